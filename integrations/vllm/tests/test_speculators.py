"""What `scripts/convert.py export to=speculators` writes, run by vLLM's own EAGLE-3."""

import torch
from conftest import counted, prompts, written
from folders import save_model, tiny

from kangaroo.drafters.eagle3 import Eagle3Config
from kangaroo.engine.engine import Engine
from kangaroo.heads import adapter_files
from kangaroo.heads.eagle3_head import Eagle3Head
from kangaroo.heads.export import write_speculators
from kangaroo.models.target import TargetModel

STEPS = 3


def head_that_knows(lm: TargetModel, prompts: list[list[int]], texts: list[list[int]]):
    """A head that has learnt these texts by heart, and its draft vocabulary."""
    frequent_K = torch.tensor(sorted({token for text in texts for token in text}))
    torch.manual_seed(0)
    head = Eagle3Head(lm, None, frequent_K).start_from(lm, frequent_K)
    optimizer = torch.optim.Adam(head.parameters(), 3e-3)
    (draft_head,) = head.draft_heads(lm, frequent_K)
    for _ in range(30):
        for prompt, text in zip(prompts, texts, strict=True):
            ids_1T = torch.tensor([prompt + text])
            with torch.no_grad():
                inputs = lm.hf(ids_1T, output_hidden_states=True).hidden_states
            before_1TD = torch.cat([inputs[tap] for tap in head.deep_taps], -1).roll(1, 1)
            length = ids_1T.shape[1]
            chunk = lm.chunk(0, length, 0, length)
            states_1TD = head(lm.embed(ids_1T), head.fuse(before_1TD), chunk, None)
            logits_MK = draft_head(states_1TD[0, len(prompt) - 1 : -1])
            target_M = torch.searchsorted(frequent_K, torch.tensor(text))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits_MK, target_M).backward()
            optimizer.step()
    return head.requires_grad_(False), frequent_K


def test_vllm_accepts_what_our_engine_accepts(serve, folders, tmp_path):
    lm = tiny(num_hidden_layers=8)  # of fewer, vLLM's three states would be two
    folders["of eight layers"] = save_model(lm.hf, tmp_path / "target")
    with serve(target="of eight layers") as llm:
        expected = written(llm, prompts())
    head, frequent_K = head_that_knows(lm, prompts(), expected)
    fields = adapter_files.describe(lm, head, {}, vocabulary=len(frequent_K))
    path = str(adapter_files.save(head, fields, frequent_K, tmp_path / "head"))
    write_speculators(path, lm, tmp_path / "exported")

    options = Eagle3Config(adapter=path, steps=STEPS, top_k=1, threshold=0.0)
    ours = Engine(lm, options.build(lm), always_drafts=True).generate(prompts(), 48, batch_size=1)
    assert [text.tokens for text in ours] == expected
    accepted = sum(step.accepted for text in ours for step in text.steps[1:])
    assert accepted > 100  # of 288 tokens

    draft = {"method": "eagle3", "model": str(tmp_path / "exported")}
    draft["num_speculative_tokens"] = STEPS
    with serve(target="of eight layers", speculative_config=draft) as llm:
        assert written(llm, prompts()) == expected
        theirs = counted(llm)
    # the last round of each text is cut where the text ends, here and there in another place
    assert abs(theirs["accepted_tokens"] - accepted) <= STEPS * len(expected)
