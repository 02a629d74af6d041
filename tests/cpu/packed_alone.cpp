// Products of GGUF's blocks without Python, for processors that are not here: any bytes are blocks, a token has the
// same bits whatever is beside it, products are those of the numbers, and none is a number if one of the token's is not.
// Ends with 0 if all that holds.
#include "packed.h"

#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr i64 WIDTH = 512, ROWS = LANES, TOKENS = 7;
int failures = 0;

void check(bool holds, i64 kind, const char* what) {
  if (holds) return;
  std::printf("kind %d: %s\n", int(kind), what);
  failures++;
}

template <class F> std::vector<float> products(F form, const std::vector<Octet>& file, const std::vector<float>& x) {
  const i64 tokens = i64(x.size()) / WIDTH;
  std::vector<Octet> packed(WIDTH / F::per_block * F::bytes);
  std::vector<Portion> portions(WIDTH / 32 * tokens);
  std::vector<float> out(tokens * LANES);
  repack(form, file.data(), i64(file.size()) / ROWS, ROWS, WIDTH, packed.data());
  for (i64 m = 0; m < tokens; m++) round_token(x.data() + m * WIDTH, WIDTH, m, tokens, portions.data());
  times_packed(form, packed.data(), WIDTH, portions.data(), tokens, out.data());
  return out;
}

template <class F> void check_form(F form, i64 kind) {
  std::mt19937 random(kind);
  std::vector<Octet> damaged(ROWS * WIDTH / F::per_block * F::block), file;
  std::vector<float> x(TOKENS * WIDTH);
  for (Octet& byte : damaged) byte = Octet(random());
  for (float& number : x) number = float(random() % 2001) / 1000 - 1;
  products(form, damaged, x);  // numbers or none, and nothing beyond the blocks
  file = damaged;
  const int at = kind == 10 ? 80 : kind == 11 ? 108 : kind == 14 ? 208 : 0;  // K types end with their scales
  for (std::size_t block = 0; block < file.size(); block += F::block)
    for (int half = 0; half < (F::shifted ? 2 : 1); half++) {
      const Half scale = Half(0x2000 + random() % 1024);  // near 1/100
      std::memcpy(&file[block + at + 2 * half], &scale, sizeof scale);
    }
  const std::vector<float> together = products(form, file, x);
  for (float odd : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> token(x.begin(), x.begin() + WIDTH);
    token[random() % WIDTH] = odd;
    for (float product : products(form, file, token)) check(product != product, kind, "an odd number is lost");
  }
  for (i64 m = 0; m < TOKENS; m++) {
    const std::vector<float> token(x.begin() + m * WIDTH, x.begin() + (m + 1) * WIDTH);
    const std::vector<float> alone = products(form, file, token);
    check(!std::memcmp(alone.data(), &together[m * LANES], sizeof(float) * LANES), kind, "bits depend on others");
    for (i64 row = 0; row < ROWS; row++) {
      std::vector<float> weights(WIDTH);
      widen_row(kind, file.data(), row, WIDTH, weights.data());
      double expected = 0, size = 0;
      for (i64 k = 0; k < WIDTH; k++) expected += double(weights[k]) * token[k], size += std::abs(weights[k]);
      check(std::abs(together[m * LANES + row] - expected) < 0.005 * size, kind, "another product");  // of eight bits
    }
  }
}

}  // namespace

int main() {
  for (i64 kind : {2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23}) with_form(kind, [&](auto form) { check_form(form, kind); });
  return failures > 0;
}
