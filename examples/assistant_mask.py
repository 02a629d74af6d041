"""For transformers' maintainers: an assistant guesses its mask: python examples/assistant_mask.py

`generate` drops an attention mask that masks nothing, and so hands its assistant none. The
assistant then takes pad tokens of the text for padding, hides them, and drafts badly. With one pad
token in the prompt even an assistant that is the model itself is wrong: its text takes more passes.
"""

import copy

import torch
import transformers

torch.manual_seed(0)
PAD = 0
config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    initializer_range=0.2,
    pad_token_id=PAD,
    bos_token_id=None,
    eos_token_id=None,
)
model = transformers.LlamaForCausalLM(config).eval()
assistant = copy.deepcopy(model)
assistant.generation_config.num_assistant_tokens_schedule = "constant"
assistant.generation_config.assistant_confidence_threshold = 0.0
passes = []
model.register_forward_hook(lambda *_: passes.append(1))

for prompt in ([3, 1, 4, 1, 5], [3, 1, PAD, 4, 1, 5]):
    passes.clear()
    tokens = torch.tensor([prompt])
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),  # nothing is padding
        assistant_model=assistant,
        max_new_tokens=63,
        do_sample=False,
    )
    print(f"transformers {transformers.__version__}: {prompt}: {len(passes)} passes")
