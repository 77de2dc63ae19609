"""Who says what an episode was worth, and what that may cost."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from owrl_jax.config.checks import ConfigError, at_least_one, finite, need

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """A model behind an OpenAI-compatible API.

    Attributes:
      url: base address, up to and with the version; empty: there is none.
      model: its name there.
      key_env: name of the environment variable that holds the key; empty: no key is sent. The key itself never stands
        in a configuration, which is saved and shown.
      usd_per_million_in, usd_per_million_out: price of prompt and reply tokens.
      attempts: of one reply.
      attempt_s, deadline_s: seconds for one attempt, and for all of them with their pauses.
    """

    url: str = ""
    model: str = ""
    key_env: str = ""
    usd_per_million_in: float = 0.0
    usd_per_million_out: float = 0.0
    attempts: int = 5
    attempt_s: float = 120.0
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        finite(self)
        at_least_one(self, "attempts")
        need(
            not self.url or self.url.startswith(("http://", "https://")),
            "url",
            self.url,
            "empty, or an address such as 'http://127.0.0.1:8730/v1'",
        )
        need(
            bool(self.model) == bool(self.url),
            "model",
            self.model,
            f"given exactly where url ({self.url!r}) is",
        )
        if self.key_env and not _VARIABLE.fullmatch(self.key_env):  # it may be a key: not shown
            raise ConfigError(
                f"key_env (of {len(self.key_env)} characters) must be the name of an environment variable, such as "
                "'JUDGE_KEY', never the key itself"
            )
        for field in ("usd_per_million_in", "usd_per_million_out"):
            need(getattr(self, field) >= 0, field, getattr(self, field), "0 or more")
        for field in ("attempt_s", "deadline_s"):
            need(getattr(self, field) > 0, field, getattr(self, field), "a positive number of seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Who says whether an episode fulfilled its task.

    Attributes:
      kind: `program`: local worlds look at their own state, and nobody judges the live web. `rubric`: a model looks.
      endpoint: of that model.
      programs: where a world's program knows: it decides, or it is only compared with and the model's word is learned.
      compared_share: where programs decide: share of their episodes that the model judges too, to be compared.
      screenshots: how many of the newest pictures are shown, the one after the last action included.
      form: how the verdict is asked for: a final line, or JSON.
      coded: whether it carries a code that no page can know; off for judges trained on a form of their own.
      temperature, max_tokens: of a reply.
      concurrency: questions at one time.
      max_usd, max_calls: what all verdicts of the run may cost together; the run stops there. Null is no limit.
      second: a held-out judge that nothing is trained against; without a url there is none.
      second_share: share of the model's verdicts that the held-out judge gives too.
      drift_window: comparisons after which it is tested whether the training judge has become too kind.
    """

    kind: Literal["program", "rubric"] = "program"
    endpoint: EndpointSettings = dataclasses.field(default_factory=EndpointSettings)
    programs: Literal["decide", "compare"] = "decide"
    compared_share: float = 0.0
    screenshots: int = 3
    form: Literal["line", "json"] = "line"
    coded: bool = True
    temperature: float = 0.0
    max_tokens: int = 2048
    concurrency: int = 8
    max_usd: float | None = None
    max_calls: int | None = None
    second: EndpointSettings = dataclasses.field(default_factory=EndpointSettings)
    second_share: float = 0.1
    drift_window: int = 100

    def __post_init__(self) -> None:
        finite(self)
        at_least_one(self, "screenshots", "max_tokens", "concurrency", "drift_window")
        need(
            self.kind == "program" or bool(self.endpoint.url),
            "endpoint.url",
            self.endpoint.url,
            "the address of a model, such as 'http://127.0.0.1:8730/v1', where kind is 'rubric'",
        )
        need(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        for field in ("compared_share", "second_share"):
            need(0 <= getattr(self, field) <= 1, field, getattr(self, field), "between 0 and 1")
        need(self.max_calls is None or self.max_calls >= 1, "max_calls", self.max_calls, "null or at least 1")
        need(self.max_usd is None or self.max_usd > 0, "max_usd", self.max_usd, "null or a positive number")
        for name in ("endpoint", "second"):
            asked: EndpointSettings = getattr(self, name)
            need(
                self.max_usd is None or not asked.url or asked.usd_per_million_in + asked.usd_per_million_out > 0,
                f"{name}.usd_per_million_in",
                asked.usd_per_million_in,
                f"positive, for max_usd={self.max_usd} to mean anything",
            )
