// Decoding on a CPU: the functions that Python calls, for float32 and bfloat16.
//
// For few tokens the time is that of reading the weights, so the code streams them: each weight is read once, whatever
// the number of tokens, and ahead of its use, with nothing but barriers in between. A token's results depend neither on
// how many others are computed beside it nor on where in the cache a draft lies, since sums are always taken in the
// same order. So verifying a chain or a tree gives the bits of decoding token by token, in bfloat16 too.
//
// Names: R rows of the batch, T tokens a row, M tokens together, D hidden size, H query heads, K key/value heads,
// G = H / K, C head size, F feed-forward size, E slots that a mask covers, N outputs.

#include "outcomes.h"
#include "rounds.h"

namespace {

template <class T>
void run_block(const Sizes& s, const Stack<T>& stack, i64 rows, i64 tokens, i64 extent, i64 first_row, T* x,
               const T* pairs, const T* bias, const T* cos, const T* sin, const i64* slots, const T* final_norm) {
  static thread_local Sight sight;
  static thread_local Masks<T> masks;
  static thread_local std::vector<i64> angles;
  masks.read(bias, rows, tokens, extent, first_row, sight);
  sight.arrange(stack.window);
  for (i64 m = angles.size(); m < rows * tokens; m++) angles.push_back(m);
  const Tokens<T> all{rows * tokens, slots, angles.data(), cos, sin, pairs};
  run_layers(s, stack, all, sight, x, final_norm);
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  extern "C" void run_block_##suffix(const Sizes* s, const Stack<T>* stack, i64 rows, i64 tokens, i64 extent,          \
                                     i64 first_row, T* x, const T* pairs, const T* bias, const T* cos, const T* sin,   \
                                     const i64* slots, const T* final_norm) {                                          \
    run_block<T>(*s, *stack, rows, tokens, extent, first_row, x, pairs, bias, cos, sin, slots, final_norm);            \
  }                                                                                                                    \
  extern "C" void read_out_##suffix(const Sizes* s, const Head<T>* head, const T* x, i64 tokens, float* logits) {      \
    read_out<T>(*s, *head, x, tokens, logits);                                                                         \
  }                                                                                                                    \
  extern "C" void round_head_##suffix(const Sizes* s, const Head<T>* head, const Rough* rough) {                       \
    round_head<T>(*s, *head, *rough);                                                                                  \
  }                                                                                                                    \
  extern "C" void choose_likeliest_##suffix(const Sizes* s, const Head<T>* head, const Rough* rough, const T* x,       \
                                            i64 tokens, i64* chosen) {                                                 \
    choose_likeliest<T>(*s, *head, *rough, x, tokens, chosen);                                                         \
  }                                                                                                                    \
  extern "C" void fuse_##suffix(const Sizes* s, const Fusing<T>* fusing, T* x, const T* before, i64 tokens) {          \
    (*fusing)(*s, x, before, tokens);                                                                                  \
  }                                                                                                                    \
  extern "C" void draft_##suffix(const Target<T>* target, const Drafting<T>* drafting, Rows<T>* rows, i64 steps,       \
                                 float threshold, const float* least) {                                                \
    Round<T>(*target, drafting, *rows).draft(steps, threshold, least);                                                 \
  }                                                                                                                    \
  extern "C" void draft_block_##suffix(const Target<T>* target, const Drafting<T>* drafting, Rows<T>* rows,            \
                                       const Places<T>* places, i64 steps, float threshold, const float* least) {      \
    Round<T>(*target, drafting, *rows).draft_block(*places, steps, threshold, least);                                  \
  }                                                                                                                    \
  extern "C" void draft_trees_##suffix(const Target<T>* target, const Drafting<T>* drafting, Rows<T>* rows, i64 steps, \
                                       i64 width, float threshold, const float* least, i64 nodes, const float* worth,  \
                                       int halves_leaves, int of_offered) {                                            \
    const Pruning pruning{nodes, worth, halves_leaves != 0, of_offered != 0};                                          \
    Round<T>(*target, drafting, *rows).draft_trees(steps, width, threshold, least, pruning);                           \
  }                                                                                                                    \
  extern "C" void verify_##suffix(const Target<T>* target, const Drafting<T>* drafting, Rows<T>* rows) {               \
    Round<T>(*target, drafting, *rows).verify();                                                                       \
  }                                                                                                                    \
  extern "C" void find_outcomes_##suffix(const Outcomes<T>* outcomes) { find_outcomes<T>(*outcomes); }                 \
  extern "C" void outcomes_back_##suffix(const Outcomes<T>* outcomes, const float* gradients, T* to) {                 \
    outcomes_back<T>(*outcomes, gradients, to);                                                                        \
  }

// The sizes of the structures that Python fills in, in the order of `CHECKED` in structs.py.
extern "C" const i64* struct_sizes() {
  static const i64 sizes[] = {sizeof(Sizes),          sizeof(Stack<float>),    sizeof(Head<float>),
                              sizeof(Rough),          sizeof(Fusing<float>),   sizeof(Target<float>),
                              sizeof(Drafting<float>), sizeof(Places<float>),  sizeof(Rows<float>),
                              sizeof(Outcomes<float>), sizeof(Draw)};
  return sizes;
}

// What this processor, and the system, let native code do: use a matrix unit; multiply bfloat16 without widening it;
// multiply bytes with tokens of bfloat16; transpose rows of bfloat16 for many tokens.
extern "C" int uses_tiles() { return has_tiles<bf16>(); }
extern "C" int multiplies_bfloat16() { return std::is_same_v<Number<bf16>, bf16>; }
extern "C" int multiplies_bytes() { return BYTES; }
extern "C" int turns_rows() { return TURNS; }

// The bytes of a matrix of GGUF's blocks in native code's layout; 0 for a kind that is not multiplied as it lies.
extern "C" i64 packed_size(i64 kind, i64 rows, i64 width) { return blocks(rows) * packed_bytes(kind, width); }

extern "C" void pack(i64 kind, const Octet* from, i64 row_bytes, i64 rows, i64 width, Octet* to, i64 threads) {
  const i64 bytes = packed_bytes(kind, width);
  PARALLEL_FOR(threads, i, blocks(rows)) {
    with_form(kind, [&](auto form) {
      repack(form, from + i * LANES * row_bytes, row_bytes, rows - i * LANES, width, to + i * bytes);
    });
  };
}

extern "C" void round_blocks(const Sizes* s, const Octet* head, i64 row_bytes, i64 outputs, const Rough* rough) {
  round_blocks(*s, head, row_bytes, outputs, *rough);
}

EXPORT(float32, float)
EXPORT(bfloat16, bf16)
