"""Writes tiny random models as GGUF files."""

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from kangaroo.models.random_models import byte_tokenizer, random_model


def write(path, architecture="llama", kinds=(Kind.Q8_0,), metadata=None, **fields):
    """A tiny random model in a file, its matrices in these formats by turns."""
    hf = random_model(architecture, **fields)
    config, tokenizer = hf.config, byte_tokenizer()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = {*tokenizer.all_special_tokens}
    types = gguf.TokenType
    writer.add_token_list(vocabulary)
    writer.add_token_types([types.CONTROL if x in special else types.NORMAL for x in vocabulary])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(258)
    writer.add_chat_template(tokenizer.chat_template)
    for name, value in (metadata or {}).items():
        writer.add_uint32(name, value)
    kind_of = next(x for x, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind_of, config.num_hidden_layers)
    written = 0
    for name, weight in hf.named_parameters():
        numbers = weight.detach().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            numbers = numbers.reshape(heads, 2, -1, config.hidden_size).swapaxes(1, 2)
            numbers = numbers.reshape(weight.shape)
        kind = Kind.F32
        if numbers.ndim == 2:
            kind = kinds[written % len(kinds)]
            written += 1
        place = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(place, gguf.quantize(numbers, kind), raw_dtype=kind)
    if "factor" in config.rope_parameters:
        places = torch.arange(0, config.head_dim, 2) / config.head_dim
        plain = config.rope_parameters["rope_theta"] ** -places
        factors = plain / hf.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return hf
