"""The supported requests of OpenAI's API. Unknown or unsupported fields are refused by name, since
ignoring one would silently change the answer."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

from kangaroo.models.prompts import content_text, valid_text
from kangaroo.utils.ranges import MOST, SEEDS

Text = Annotated[str, AfterValidator(valid_text)]
Ids = Annotated[list[int], Field(min_length=1)]
MOST_LOGPROBS = 20  # of a token
Stop = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(valid_text)]


def by_field(*groups: tuple[str, list[Any]]) -> dict[str, list[Any]]:
    """For each field of these groups, the values that have no effect, besides null."""
    return {name: values for names, values in groups for name in names.split()}


# Fields that OpenAI's clients may send with these values alone.
UNSUPPORTED = by_field(
    ("echo", [False]),
    ("presence_penalty frequency_penalty min_p", [0]),
    ("best_of repetition_penalty", [1]),
    ("tools functions", [[]]),
    ("tool_choice function_call", ["none", "auto"]),
    ("audio prediction reasoning_effort web_search_options", []),
    ("suffix", [""]),
    ("parallel_tool_calls", [True, False]),
    ("skip_special_tokens spaces_between_special_tokens", [True]),
    ("modalities", [["text"]]),
)
# Fields that never change an answer.
IGNORED = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}


class Strict(BaseModel):
    """An object of a request, in which null is the same as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[dict[str, list[Any]]] = {}  # fields with their harmless values
    ignored: ClassVar[set[str]] = set()  # fields that never change an answer

    @model_validator(mode="before")
    @classmethod
    def without_unsupported(cls, fields: Any) -> Any:
        """The fields without those that have no effect here."""
        if not isinstance(fields, dict):
            return fields
        served = {n: v for n, v in fields.items() if v is not None and n not in cls.ignored}
        for name, harmless in cls.unsupported.items():
            value = served.pop(name, None)
            # in JSON, unlike Python, true is not 1
            same = (value == x and isinstance(value, bool) == isinstance(x, bool) for x in harmless)
            if value is not None and not any(same):
                raise ValueError(f"'{name}' is not served here; leave it out")
        return served


class StreamOptions(Strict):
    """Which token counts a stream contains."""

    include_usage: bool = False  # the final ones, in a last part of their own
    continuous_usage_stats: bool = False  # those so far in every part, as in vLLM's servers


class Schema(Strict):
    """A JSON schema, of which the name and the description change nothing."""

    ignored = {"name", "description", "strict"}
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    """What the answer is: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: Schema | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The schema that the answer follows; None for any text."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        return {"type": "object"} if self.type == "json_object" else None

    @model_validator(mode="after")
    def with_schema(self) -> Self:
        """Check that there is a schema where the type asks for one, and only there."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(f"type='{self.type}' and 'json_schema' do not go together")
        return self


class TextRequest(Strict):
    """The fields of both kinds of requests."""

    unsupported = UNSUPPORTED
    ignored = IGNORED
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=MOST)
    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: Annotated[int, Field(ge=0, le=MOST), BeforeValidator(lambda k: 0 if k == -1 else k)] = 0
    n: int = Field(default=1, ge=1, le=16)
    seed: int | None = Field(default=None, ge=-SEEDS, lt=SEEDS)
    stop: Annotated[
        list[Stop],
        Field(max_length=16),
        BeforeValidator(lambda x: [x] if isinstance(x, str) else x),
    ] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    logit_bias: dict[
        Annotated[int, Field(strict=False)],  # a string, as all keys in JSON
        Annotated[float, Field(ge=-100, le=100)],
    ] = Field(default_factory=dict)
    response_format: ResponseFormat = Field(default_factory=ResponseFormat)
    drafts: bool = True  # whether a drafter may help; the text is the same

    @model_validator(mode="after")
    def with_consistent_fields(self) -> Self:
        """Check `min_tokens`, which only `ignore_eos` enforces, and the last choice's seed."""
        if self.min_tokens and not self.ignore_eos:
            raise ValueError(f"min_tokens={self.min_tokens} is served with ignore_eos=true alone")
        if self.seed is not None and self.seed + self.n > SEEDS:
            raise ValueError(f"seed={self.seed} must be {SEEDS - self.n} or less where n={self.n}")
        return self


def as_list(prompt: Any) -> Any:
    """The prompts: a list of strings or of lists stays, anything else is one prompt."""
    is_list = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return prompt if is_list else [prompt]


class Completion(TextRequest):
    """A request to continue a prompt, a string or token ids, or each of a list of prompts."""

    prompt: Annotated[list[Text | Ids], Field(max_length=2048), BeforeValidator(as_list)]
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=MOST_LOGPROBS),
        BeforeValidator(lambda x: None if x is False else x),
    ] = None

    @property
    def shown_logprobs(self) -> int | None:
        """For how many likeliest tokens the answer has logprobs; None asks for none."""
        return self.logprobs


class TextPart(Strict):
    """A text part of a message; no other parts are supported."""

    type: Literal["text"]
    text: Text


class ChatMessage(Strict):
    """A turn of a conversation."""

    # clients send earlier answers back with these fields
    unsupported = by_field(("refusal audio function_call", []), ("annotations tool_calls", [[]]))
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return content_text(self.model_dump()["content"])


class Chat(TextRequest):
    """A request for the next turn of a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MOST)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)

    @model_validator(mode="after")
    def with_logprobs(self) -> Self:
        """Check that `top_logprobs` comes with `logprobs`, as in OpenAI's API."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @property
    def shown_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None
