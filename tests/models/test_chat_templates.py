"""Loss masks: which tokens the assistant wrote, for templates of every common form."""

from itertools import groupby

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kangaroo.models.loading import chat_template
from kangaroo.models.prompts import masked_ids, prompt_ids, turn_end, user_header
from kangaroo.utils.errors import ConfigError, PromptError

# Forms of templates in the wild, in our own words: (template, end of turn).
TEMPLATES = {
    "vicuna": (chat_template("vicuna"), "</s>"),
    "chatml": (chat_template("chatml"), "<|im_end|>"),
    "inst": (  # Llama 2: BOS and EOS around every exchange, the system turn inside the first
        "{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = '<<SYS>>' + m.content + '<</SYS>>\\n' %}"
        "{% elif m.role == 'user' %}{{ bos_token + '[INST] ' + ns.system + m.content.strip()"
        " + ' [/INST]' }}{% set ns.system = '' %}"
        "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "headers": (  # Llama 3
        "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\\n\\n'"
        " + m.content.strip() + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}",
        "<|eot|>",
    ),
    "strict": (  # Mistral: refuses a system turn and turns that do not alternate
        "{{ bos_token }}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "marked": (  # says itself what the assistant wrote
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ 'A:\n' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.role + ': ' + m.content + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A:\n' }}{% endif %}",
        "</s>",
    ),
}
BOS_ONCE = {"vicuna", "headers", "strict", "marked"}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"]
TEXT = [
    "Why is the sky blue? Because of Rayleigh scattering, which favours short waves.\n",
    "system user assistant USER: ASSISTANT: [INST] [/INST] You help. 1 2 3 \n\n  \n# A title\n",
    "Größe, naïve café, 日本語のテキスト, и русский; 🦘 jumps.\n",
]
BLANK = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
BLANK += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
BARE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
ENDS = TEMPLATES | {"bare": (BARE, None), "none": (None, None)}
FAILS_LATER = "{{ messages[0].content }}{% if messages | length > 1 %}{{ 1 + 'a' }}{% endif %}"


def byte_level():
    """GPT-2's kind: words with their blank before them, runs of blanks and newlines merged."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"initial_alphabet": alphabet, "special_tokens": SPECIAL, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=500, **how)
    tokenizer.train_from_iterator(TEXT * 5, trainer)
    return tokenizer


def metaspace():
    """Llama 2's kind: a blank is a character of its own, one is put before the text."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(blanks)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(decoding)
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", *SPECIAL, *octets]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([line for text in TEXT for line in text.split("\n")], trainer)
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, metaspace])
def backend(request):
    return request.param()


def with_template(backend, template):
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": SPECIAL}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents):
    roles = "user", "assistant"
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


ANSWERS = ["Because of scattering, 日本語 🦘.", "No: café\n\nnaïve", "3"]
CONVERSATION = turns("Why?", ANSWERS[0], "Is that  so?\n", ANSWERS[1], "1 2", ANSWERS[2])


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_the_answers_and_their_ends_are_marked(backend, name, system):
    template, end = TEMPLATES[name]
    tokenizer = with_template(backend, template)
    before = [{"role": "system", "content": "You help."}] if system else []
    if system and name == "strict":
        with pytest.raises(PromptError, match="refuses a conversation of system, user"):
            masked_ids(tokenizer, before + CONVERSATION)
        return
    ids, mask = masked_ids(tokenizer, before + CONVERSATION)
    gap = " " if name == "inst" else ""
    runs = groupby(zip(mask, ids, strict=True), lambda pair: pair[0])
    marked = [[token for _, token in run] for is_marked, run in runs if is_marked]
    texts = [tokenizer.decode(run).strip() for run in marked]
    assert texts == [answer + gap + end for answer in ANSWERS]
    if name in BOS_ONCE:
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    rendered = tokenizer.apply_chat_template(before + CONVERSATION, return_dict=False)
    assert tokenizer.decode(ids) == tokenizer.decode(rendered)


@pytest.mark.parametrize("length", [2, 6])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_at_inference_is_a_prefix_of_the_sample(backend, name, length):
    """And what follows it, up to the end of the turn, is all that is marked there."""
    tokenizer = with_template(backend, TEMPLATES[name][0])
    ids, mask = masked_ids(tokenizer, CONVERSATION[:length])
    prompt = prompt_ids(tokenizer, CONVERSATION[: length - 1])
    assert ids[: len(prompt)] == prompt
    written = sum(mask[len(prompt) :])
    assert mask[len(prompt) :][:written] == [1] * written and not mask[len(prompt) - 1]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_next_user_turn_begins_where_the_header_ends(backend, name):
    tokenizer = with_template(backend, TEMPLATES[name][0])
    header, end = user_header(tokenizer, CONVERSATION[:2])

    def text(ids):  # without blanks, of which this decoder adds some
        return "".join(tokenizer.decode(ids).split())

    rest = text(prompt_ids(tokenizer, CONVERSATION[:3])).removeprefix(text(header))
    assert rest.startswith("Isthatso?" + "".join(end.split())) and end


@pytest.mark.parametrize(
    "template, answer, header, marked",
    [
        # a token across the beginning is the template's: the second newline is the answer's
        (TEMPLATES["chatml"][0], "\n\nBecause", "assistant\n\n", "\nBecause<|im_end|>"),
        # byte-level tokenizers report a blank as a point at its end, where the answer begins
        (BLANK, "\nBecause", "assistant: ", "\nBecause"),
    ],
    ids=["newlines", "blank"],
)
def test_what_a_header_ends_with_is_the_headers(template, answer, header, marked):
    tokenizer = with_template(byte_level(), template)
    ids, mask = masked_ids(tokenizer, turns("Why?", answer))
    begin, end = mask.index(1), len(mask) - mask[::-1].index(1)
    assert tokenizer.decode(ids[:begin]).endswith(header) and all(mask[begin:end])
    assert tokenizer.decode(ids[begin:end]) == marked


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name():
    thinking = (
        "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' and loop.last %}"
        "{{ '<think></think>' }}{% endif %}{{ m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer = with_template(byte_level(), thinking)
    tokenizer.name_or_path = "some/model"
    with pytest.raises(ConfigError, match=r"some/model.*turn 2.*generation"):
        masked_ids(tokenizer, CONVERSATION)
    _, mask = masked_ids(tokenizer, CONVERSATION[:2])
    assert any(mask)


@pytest.mark.parametrize("name", ENDS)
def test_the_token_that_ends_a_turn_is_seen_in_the_template_where_there_is_one(backend, name):
    template, end = ENDS[name]
    tokenizer = with_template(backend, template)
    assert turn_end(tokenizer) == (end and tokenizer.convert_tokens_to_ids(end))


def test_a_user_turn_that_ends_with_nothing_is_refused(backend):
    with pytest.raises(ConfigError, match="writes nothing after a user's turn"):
        user_header(with_template(backend, BARE))


@pytest.mark.parametrize(
    "template, message",
    [
        ({"rag": "{{ messages }}"}, "multiple chat templates with no default"),
        ("{% if %}", "TemplateSyntaxError"),
        (FAILS_LATER, "TypeError"),
        (FAILS_LATER + "{% generation %}{% endgeneration %}", "TypeError"),
    ],
)
def test_a_template_that_fails_at_a_conversation_refuses_it(backend, template, message):
    tokenizer = with_template(backend, template)
    for ids in (prompt_ids, masked_ids):
        with pytest.raises(PromptError, match=rf"of user, assistant, .*{message}.* or vicuna"):
            ids(tokenizer, CONVERSATION)
