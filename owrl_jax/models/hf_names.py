"""Which tensors of a checkpoint make up which parameter, for every naming and layout in circulation.

The parameter table names tensors as `transformers` from 4.57 on writes them. Older and headless checkpoints differ in
prefixes, and the weights of experts come in three forms:

    input-major   gate_up_proj [E, D, 2I], down_proj [E, I, D]     the released checkpoints
    output-major  gate_up_proj [E, 2I, D], down_proj [E, D, I]     what transformers 5 holds and saves
    per expert    {e}.gate_proj, {e}.up_proj [I, D], {e}.down_proj [D, I]

The two fused forms are told apart by shape, over both tensors of all layers together: at most one of 2I = D and I = D
holds, so one of the two shapes always decides, even where the other is square.

Invariant: a plan uses every tensor of the checkpoint exactly once and fills every parameter, or is not made at all.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

import numpy as np

from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.qwen3_vl.table import Layout, Row, table
from owrl_jax.models.tensor_files import FLOATS, LoadError, Stored

ExpertLayout = Literal["input_major", "output_major"]
Index = tuple[slice, ...]

_VISUAL = re.compile(r"^(?:model\.)?visual\.(.+)$")
_HEAD = re.compile(r"^(?:model\.|language_model\.)*lm_head\.weight$")
_TEXT = re.compile(r"^(?:model\.|language_model\.)*((?:embed_tokens|layers|norm)\..+)$")
_BUFFER = re.compile(r"rotary_(?:pos_)?emb\.inv_freq$")  # computed from the configuration; old versions stored it
_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Whole:
    """One layer of one parameter that is one tensor in the files, rearranged."""

    tensor: Stored
    layout: Layout
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The tensors it is read from."""
        return (self.tensor,)

    def read(self, index: Index) -> np.ndarray:
        """A fresh copy of part of the parameter, in our shape, as bits."""
        # The rearrangement is a view of the mapped file, so only what `index` selects is read; and it stays a view of
        # the copy (order K), since the transfer to a device transposes several times faster than numpy does.
        return np.array(self.layout.from_hf(self.tensor.bits(), self.shape)[index], order="K")


@dataclasses.dataclass(frozen=True)
class PerExpert:
    """One layer of experts: [E, D, 2, I] from matrices (gate, up) of [I, D], or [E, I, D] from (down,) of [D, I]."""

    parts: tuple[tuple[Stored, ...], ...]
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The tensors it is read from."""
        return tuple(tensor for parts in self.parts for tensor in parts)

    def read(self, index: Index) -> np.ndarray:
        """As `Whole.read`."""
        experts, rows, *halves, columns = index
        shape = [len(range(*part.indices(size))) for part, size in zip(index, self.shape, strict=True)]
        out = np.empty(shape, self.parts[0][0].bits().dtype)
        for slot, parts in zip(out, self.parts[experts], strict=True):
            targets = slot.swapaxes(0, 1) if halves else [slot]
            for target, tensor in zip(targets, parts[halves[0]] if halves else parts, strict=True):
                target[...] = tensor.bits().T[rows, columns]
        return out


Source = Whole | PerExpert


def canonical(name: str, config: ModelConfig) -> str:
    """The table's name of a tensor; a name that is none of the model's comes back unchanged."""
    if _HEAD.match(name):
        return "lm_head.weight"
    if config.vision and (match := _VISUAL.match(name)):
        return f"model.visual.{match[1]}"
    if match := _TEXT.match(name):
        return f"model.language_model.{match[1]}" if config.vision else f"model.{match[1]}"
    return name


def layout_of(row: Row, kind: ExpertLayout) -> Layout:
    """How this row lies in a file whose fused expert tensors are of that kind."""
    if not row.expert or kind == "input_major":
        return row.layout
    if len(row.shape) == 4:
        e, d, two, i = row.shape
        return Layout(hf_shape=(e, two * i, d), view=(e, two, i, d), order=(0, 3, 1, 2))
    e, i, d = row.shape
    return Layout(hf_shape=(e, d, i), view=(e, d, i), order=(0, 2, 1))


def plan(config: ModelConfig, stored: Mapping[str, Stored]) -> list[tuple[Row, tuple[Source, ...]]]:
    """For every parameter, the sources of its layers in stacking order.

    Reads no tensor, except a stored head of a tied model, which must equal the embedding.

    Raises:
      LoadError: naming tensors, files, shapes and what to do, unless names and shapes fit exactly.
    """
    tensors: dict[str, Stored] = {}
    for name, tensor in stored.items():
        known = canonical(name, config)
        if known in tensors:
            raise LoadError(
                f"{tensor} and {tensors[known]} are both {known!r}: remove one of the two from the checkpoint"
            )
        if not _BUFFER.search(known):
            tensors[known] = tensor
    _check_depths(config, tensors)
    head = tensors.pop("lm_head.weight", None) if config.text.tied else None

    experts = _experts(tensors)
    kind = _expert_kind(config, tensors)
    rows: list[tuple[Row, tuple[Source, ...]]] = []
    missing: list[str] = []
    misfits: list[str] = []
    for row in table(config):
        sources: list[Source] = []
        layout = layout_of(row, kind)
        for name in row.hf_names():
            if name in tensors:
                tensor = tensors.pop(name)
                misfits += _misfit(tensor, layout.hf_shape)
                sources.append(Whole(tensor, layout, row.shape))
            elif row.expert and name in experts:
                source = _per_expert(row, experts[name], missing)
                for part in source.stored:
                    misfits += _misfit(part, (row.shape[-1], row.shape[1]))
                sources.append(source)
            else:
                missing.append(name)
        rows.append((row, tuple(sources)))
    extra = [*tensors.values(), *(tensor for parts in experts.values() for tensor in parts.values())]
    if missing or misfits or extra:
        raise LoadError(_complaint(config, missing, misfits, extra, stored))
    if head is not None:
        _check_tied(head, rows)
    return rows


def _misfit(tensor: Stored, shape: tuple[int, ...]) -> list[str]:
    if tensor.dtype not in FLOATS:
        return [f"{tensor} has dtype {tensor.dtype}, not one of {', '.join(FLOATS)}: use the bfloat16 release"]
    if tensor.shape != shape:
        return [f"{tensor} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"]
    return []


def _experts(tensors: dict[str, Stored]) -> dict[str, dict[tuple[int, str], Stored]]:
    """Takes per-expert matrices out of `tensors`, grouped by the fused tensor they stand for."""
    found: dict[str, dict[tuple[int, str], Stored]] = {}
    for name in [name for name in tensors if _EXPERT.match(name)]:
        prefix, expert, part = _EXPERT.match(name).groups()  # type: ignore[union-attr]
        fused = f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj"
        found.setdefault(fused, {})[int(expert), part] = tensors.pop(name)
    return found


def _per_expert(row: Row, found: dict[tuple[int, str], Stored], missing: list[str]) -> PerExpert:
    """The source that these matrices make; takes them out of `found` and notes those that are missing."""
    wanted = ("gate", "up") if len(row.shape) == 4 else ("down",)
    sample = next(iter(found.values())).name
    parts: list[tuple[Stored, ...]] = []
    for expert in range(row.shape[0]):
        have = [found.pop((expert, part), None) for part in wanted]
        missing += [
            re.sub(r"experts\.\d+\.\w+_proj", f"experts.{expert}.{part}_proj", sample)
            for part, tensor in zip(wanted, have, strict=True)
            if tensor is None
        ]
        parts.append(tuple(tensor for tensor in have if tensor is not None))
    return PerExpert(tuple(parts), row.shape)


def _expert_kind(config: ModelConfig, tensors: Mapping[str, Stored]) -> ExpertLayout:
    """The one form that fits the most fused tensors; a tensor that fits neither is then found to be mis-shaped."""
    votes: dict[ExpertLayout, int] = {"input_major": 0, "output_major": 0}
    for row in table(config):
        for name in row.hf_names() if row.expert else ():
            for kind in votes:
                votes[kind] += name in tensors and tensors[name].shape == layout_of(row, kind).hf_shape
    return "output_major" if votes["output_major"] > votes["input_major"] else "input_major"


def _depth(names: Mapping[str, Stored], prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    return max((int(match[1]) + 1 for name in names if (match := pattern.match(name))), default=0)


def _check_depths(config: ModelConfig, tensors: Mapping[str, Stored]) -> None:
    """A configuration of another size of model gives hundreds of missing or extra names; say the cause instead."""
    prefix = "model.language_model." if config.vision else "model."
    checks = [("num_hidden_layers", config.text.layers, f"{prefix}layers.")]
    if config.vision:
        checks.append(("vision_config.depth", config.vision.depth, "model.visual.blocks."))
    for key, wanted, where in checks:
        have = _depth(tensors, where)
        if have and have != wanted:
            folder = next(iter(tensors.values())).file.parent
            raise LoadError(
                f"{folder}: the configuration says {key}={wanted}, the files hold {have} of these layers: the two "
                " belong to different models; take both from the same folder"
            )


def _complaint(
    config: ModelConfig, missing: list[str], misfits: list[str], extra: list[Stored], stored: Mapping[str, Stored]
) -> str:
    """One message for everything that is wrong."""
    folder = next(iter(stored.values())).file.parent if stored else "the checkpoint"
    lines = [f"{folder} does not hold the {config.family} model of its configuration; nothing was loaded."]
    lines += _listed("mis-shaped", misfits)
    lines += _listed("missing", [f"{name!r}" for name in missing])
    lines += _listed("unknown", [str(tensor) for tensor in extra])
    if misfits:
        lines.append("Take config.json and weights from the same folder.")
    if missing == ["lm_head.weight"]:
        lines.append(
            "config.json says at its top level that the head is not tied to the embedding, so a head is needed. If the "
            "model was trained tied, or only its states are wanted, pass config= with text.tied=True."
        )
    elif missing and extra:
        lines.append(
            "Missing and unknown names together: another kind of model, or naming that this port does not know."
        )
    elif missing:
        lines.append("The checkpoint is incomplete: download or export it again.")
    elif extra:
        lines.append("A tensor nobody uses may be an adapter or another part of a larger model: remove it if so.")
    return "\n".join(lines)


def _listed(kind: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"  … and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"{len(items)} {kind}:", *(f"  {item}" for item in items[:_SHOWN]), *more]


def _check_tied(head: Stored, rows: list[tuple[Row, tuple[Source, ...]]]) -> None:
    """A tied model may store its head again; one that differs means that the tie flag is wrong."""
    (source,) = next(sources for row, sources in rows if row.name == "embed.table")
    (table_,) = source.stored
    same = head.shape == table_.shape and head.dtype == table_.dtype
    step = max(1, (1 << 24) // table_.shape[1])  # 16 M values at a time
    starts = range(0, table_.shape[0], step)
    if same and all(np.array_equal(head.bits()[i : i + step], table_.bits()[i : i + step]) for i in starts):
        return
    raise LoadError(
        f"{head} ({head.dtype} {list(head.shape)}) differs from the embedding {table_.name!r} ({table_.dtype} "
        f"{list(table_.shape)}), but config.json says tie_word_embeddings=true at its top level. One of the two is "
        "wrong: if the model has its own head, set the flag to false (the top level counts); if not, remove the head"
    )
