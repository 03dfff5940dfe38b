"""The model that a study is about: described at once, loaded only when something has to be computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mless import templates
from mless.errors import BadPrompt, BadStudy, TokenizerFault
from mless.prompting import align
from mless.study.identity import slug
from mless.values import Condition, Item, Prompt

if TYPE_CHECKING:
    from mless.models import LoadedModel
    from mless.models.loading import Description
    from mless.study.bench import Progress
    from mless.study.spec import StudySpec


class Subject:
    """A model with weights, or one known by its name only (a server's, a script's)."""

    def __init__(self, spec: StudySpec, described: Description | None, trust_remote_code: bool) -> None:
        self._spec, self.described, self._trust = spec, described, trust_remote_code
        self.tokenizer: Any = None
        self.loaded: LoadedModel | None = None
        #: What workers say of the model that they loaded.
        self.elsewhere: Mapping[str, str | None] = {}
        self.label = described.source.label if described is not None else slug(spec.model)
        self.layers = described.layers if described is not None else None
        self.heads = described.heads if described is not None else None
        self.context = described.context if described is not None else None

    @classmethod
    def open(cls, spec: StudySpec, progress: Progress, *, weights: bool, trust_remote_code: bool) -> Subject:
        if not weights:
            return cls(spec, None, trust_remote_code)
        from mless.models import describe

        described = describe(spec.model, trust_remote_code=trust_remote_code, say=progress.say, step=progress.step)
        return cls(spec, described, trust_remote_code)

    def attending(self, layers: Sequence[int]) -> list[int]:
        """Those of the layers that have attention; in a hybrid model not all do. A layer asked for by number must have it."""
        assert self.described is not None
        return self.described.attending(None if self._spec.layers.strip() == "all" else layers)

    def fingerprint(self, layers: Sequence[int], *, head: bool, progress: Progress, anew: bool = False) -> str:
        """The weights that are read, by their digest; of a model known by name, its name."""
        if self.described is None:
            return self._spec.model
        from mless.models.loading import fingerprint

        return fingerprint(self.described.source, max(layers), head=head, step=progress.step, anew=anew)

    def load(
        self, progress: Progress, *, layers: Sequence[int] | None = None, head: bool = False, dtype: str | None = None
    ) -> None:
        """The weights of all layers, or of those up to the last one asked for, and the tokenizer."""
        from mless.models import load

        assert self.described is not None
        spec = self._spec
        if self.tokenizer is None:
            self.load_tokenizer()
        if layers is None:
            progress.say(f"loading {self.label}, with its language-model head")
        else:
            part = "layer 1" if max(layers) == 1 else f"layers 1–{max(layers)}"
            progress.say(f"loading {self.label}, {part} of {self.layers}")
        self.loaded = load(
            self.described,
            layers=layers,
            tokenizer=self.tokenizer,
            dtype=dtype or spec.dtype,
            device=spec.device,
            device_map=spec.device_map,
            device_memory=spec.device_memory,
            head=head,
            trust_remote_code=self._trust,
            say=progress.say,
            step=progress.step,
        )
        self.tokenizer = self.loaded.tokenizer

    def load_tokenizer(self) -> None:
        """The tokenizer alone: the model's own, or the one that was asked for; none where there is neither."""
        from mless.models.tokenizers import load_tokenizer, open_tokenizer

        given = self._spec.tokenizer
        if self.described is not None:
            source, config = self.described.source, self.described.config
            self.tokenizer = load_tokenizer(source, given, config, trust_remote_code=self._trust)
        elif given is not None:
            self.tokenizer = open_tokenizer(given, trust_remote_code=self._trust)
        if self._spec.prompt != "raw":
            templates.begin(self.tokenizer)  # it starts while the weights are read

    def known(self, name: str) -> str | None:
        """A fingerprint of what was loaded, here or by workers."""
        return self.elsewhere.get(name) if self.loaded is None else getattr(self.loaded, name, None)

    def about(self) -> dict[str, Any]:
        """What study.json says of the model."""
        from mless.models.adapters import activation_of

        described = self.described
        return {
            "name": self._spec.model,
            "label": self.label,
            "family": described.family if described is not None else None,
            "layers": self.layers,
            "heads": self.heads,
            "context": self.context,
            "activation": activation_of(described.config) if described is not None else None,
            "parameters": described.built[1] if described is not None else None,
            "fingerprint": self.known("fingerprint"),
            "origin": described.source.origin if described is not None else None,
            "revision": (described.source.revision or described.source.gguf_sha256) if described is not None else None,
        }


def check_arm(conditions: Sequence[Condition], layers: int) -> None:
    """Refuse a layer for ARM that the model does not have."""
    for condition in conditions:
        for layer in condition.arm.layers if condition.arm is not None else ():
            if layer > layers:
                raise BadStudy(
                    f"condition {condition.name!r}: no layer {layer} for ARM: this model's layers are 1 to {layers} (numbered from 1)"
                )


def check_pairs(prompts: Mapping[str, Sequence[Prompt]]) -> None:
    """Both prompts of every pair hold the same original tokens."""
    for rows in prompts.values():
        for without, prompt in zip(prompts["none"], rows, strict=True):
            align(without, prompt)


def check_questions(tokenizer: Any, context: int | None, label: str, items: Sequence[Item]) -> None:
    """Refuse a question that cannot fit, before it is split into tokens: that takes a second per 100,000 characters."""
    if context is None:
        return
    # No token stands for more characters; four times as many, because some tokenizers shorten a text first.
    most = 4 * context * max(map(len, tokenizer.get_vocab()), default=1)
    for item in items:
        if len(item.question) > most:
            raise BadPrompt(
                f"item {item.id!r} has {len(item.question):,} characters, but {label} takes {context:,} tokens; leave it out of the data"
            )


def check_prompt(model: LoadedModel, prompt: Prompt) -> None:
    """Check a prompt: not too long, with BOS where needed, and own positions only where the model takes them."""
    from mless.capture.positions import check_position_ids, check_reach

    if model.bos is not None and prompt.token_ids[0] != model.bos:
        raise TokenizerFault(
            f"item {prompt.item!r}: the prompt does not begin with the BOS token (id {model.bos}) that {model.label} was trained with; give "
            "a tokenizer whose chat template writes it (--tokenizer), or use --prompt raw"
        )
    check_position_ids(model, [prompt])
    check_reach(model, [prompt])
