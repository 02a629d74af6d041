"""What clients may ask for: the requests of OpenAI's API, in so far as they are served.

A field that is not known, or cannot be served, is refused by name: to leave it out in silence would
give another answer than was asked for.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

from kangaroo.models.prompts import content_text, valid_text
from kangaroo.utils.ranges import MOST, SEEDS

MOST_CHOICES, MOST_STOPS, LONGEST_STOP = 16, 16, 256

Text = Annotated[str, AfterValidator(valid_text)]
Stop = Annotated[str, Field(max_length=LONGEST_STOP, min_length=1), AfterValidator(valid_text)]


def harmless_values(*groups: tuple[str, list[Any]]) -> dict[str, list[Any]]:
    """Of fields that are not served, the values that ask for nothing, beside null."""
    return {name: values for names, values in groups for name in names.split()}


# What OpenAI's clients may send.
NOTHING = harmless_values(
    ("logprobs echo", [False]),
    ("top_logprobs presence_penalty frequency_penalty min_p", [0]),
    ("best_of repetition_penalty", [1]),
    ("tools functions", [[]]),
    ("tool_choice function_call", ["none", "auto"]),
    ("audio prediction reasoning_effort web_search_options", []),
    ("suffix", [""]),
    ("logit_bias", [{}]),
    ("parallel_tool_calls", [True, False]),
    ("skip_special_tokens spaces_between_special_tokens", [True]),
    ("response_format", [{"type": "text"}]),
    ("modalities", [["text"]]),
)
# What changes no answer.
IGNORED = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}


class Strict(BaseModel):
    """An object of a request: null is as good as left out."""

    model_config = ConfigDict(extra="forbid", strict=True)
    nothing: ClassVar[dict[str, list[Any]]] = {}  # fields not served, and values that are harmless
    ignored: ClassVar[set[str]] = set()  # fields that change no answer

    @model_validator(mode="before")
    @classmethod
    def without_what_asks_for_nothing(cls, fields: Any) -> Any:
        """The fields that ask for something."""
        if not isinstance(fields, dict):
            return fields
        given = {n: v for n, v in fields.items() if v is not None and n not in cls.ignored}
        for name, harmless in cls.nothing.items():
            value = given.pop(name, None)
            # true is no number in JSON
            same = (value == x and isinstance(value, bool) == isinstance(x, bool) for x in harmless)
            if value is not None and not any(same):
                raise ValueError(f"'{name}' is not served here; leave it out")
        return given


class StreamOptions(Strict):
    """What a stream tells besides text: the counts of tokens, in a last part of their own; and with
    every part those so far, as vLLM's servers do, which clients that measure ask for."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextRequest(Strict):
    """What both kinds of requests have in common."""

    nothing, ignored = NOTHING, IGNORED
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: Annotated[int, Field(ge=0, le=MOST), BeforeValidator(lambda k: 0 if k == -1 else k)] = 0
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(default=None, ge=-SEEDS, lt=SEEDS)
    stop: Annotated[
        list[Stop],
        Field(max_length=MOST_STOPS),
        BeforeValidator(lambda x: [x] if isinstance(x, str) else x),
    ] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def with_fields_that_go_together(self) -> Self:
        """Choice i has seed + i; and `ignore_eos`, which clients that measure send beside
        `min_tokens`, has the same effect."""
        if self.min_tokens and not self.ignore_eos:
            raise ValueError(f"min_tokens={self.min_tokens} is served with ignore_eos=true alone")
        if self.seed is not None and self.seed + self.n > SEEDS:
            raise ValueError(f"seed={self.seed} must be {SEEDS - self.n} or less where n={self.n}")
        return self


class Completion(TextRequest):
    """A request for text that goes on from a prompt: text, alone or in a list, or token ids."""

    prompt: Annotated[
        Text | Annotated[list[int], Field(min_length=1)],
        BeforeValidator(
            lambda x: x[0] if isinstance(x, list) and [str] == list(map(type, x)) else x
        ),
    ]


class TextPart(Strict):
    """A part of a message; others than text are refused."""

    type: Literal["text"]
    text: Text


class ChatMessage(Strict):
    """A turn of a conversation."""

    # of an answer that is sent back
    nothing = harmless_values(("refusal audio function_call", []), ("annotations tool_calls", [[]]))
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """All that it says."""
        return content_text(self.model_dump()["content"])


class Chat(TextRequest):
    """A request for the next turn of a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
