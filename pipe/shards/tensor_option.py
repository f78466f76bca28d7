"""The options `tensor_parallel=`, the styles of modules, and `sends=`, how members send activations.

{"blocks.*.up": "column", "blocks.*.down": "row"}     patterns of module names; a word, or a style
"auto"                                                the model's own plan, or recognised modules

"auto"    parts where ranks are on different hosts and the members of each on one: the network carries each byte once
"parts"   of 1/T, gathered on arrival, wherever all members hold the same tensor
"whole"   from each member
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ...comm import Collectives, MeshPlace
from ...partition.model.forms import Arguments
from ...partition.model.linear_loss import LinearCrossEntropy
from .attention import Experts, Heads
from .recognise import HEADS, Recogniser, Region
from .style import Style, StyleError, match, matches, not_divided
from .styles import Column, Local, Row, Samples, Sequence, SharedKey, Summed, SummedGradients, sizes_of

AUTO = "auto"
TensorParallelLike = str | Mapping[str, str | ParallelStyle]

WORDS = ("column", "row", "sequence", "samples")
SENDS = ("auto", "parts", "whole")

# Words of the plans that models of transformers have, `config.base_model_tp_plan`.
_GROUPS = ("moe_tp_experts", "local_params")  # of modules whose own parameters the plan names one by one
_MODULES = {
    "colwise": Column,
    "colwise_rep": lambda: Column(gather_output=True),
    "colwise_gather_output": lambda: Column(gather_output=True),
    "rowwise": Row,
    "rowwise_rep": lambda: Row(split_input=True),
    "rowwise_split_input": lambda: Row(split_input=True),
    "packed_colwise": lambda: Column(blocks=2),
    "embedding_rowwise": Row,
    "embedding_colwise": Column,
    "sequence_parallel": Sequence,
    "replicated_with_grad_allreduce": SummedGradients,
}
_WHOLE = ("replicate",)
_NOT_RUN = ("packed_rowwise", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts", "ep_router", "gather")
_PARAMETERS = {"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1)}  # dimension, blocks

LEAST_BYTES = 1 << 16  # of a tensor that "auto" sends in parts: gathering a smaller one takes longer than it saves


def peers_in_parts(sends: str, place: MeshPlace, collectives: Collectives) -> frozenset[int]:
    """Ranks to and from which this process sends in parts, the same for all members of a group. Collective. Groups of
    another size would have other parts: they get whole tensors."""
    sizes = place.mesh.tensor_sizes
    if max(sizes) == 1 or sends == "whole":
        return frozenset()
    (own,) = place.local_ranks
    others = [rank for rank, size in enumerate(sizes) if rank != own and size == sizes[own] > 1]
    if sends == "parts":
        return frozenset(others)
    hosts = collectives.gather(socket.gethostname(), what="finding the hosts of all ranks")
    by_rank = [{hosts[process] for process in place.mesh.members(rank)} for rank in range(len(sizes))]
    return frozenset(
        rank for rank in others if len(by_rank[rank]) == len(by_rank[own]) == 1 and by_rank[rank] != by_rank[own]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStyles:
    """Styles of a model's modules."""

    count: int  # members of a tensor group
    styles: Mapping[str, ParallelStyle]  # by module name, in the model's order; empty: nothing is cut
    # Why, by name, for modules that "auto" knows and leaves whole.
    whole: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        each = [f"{name}: {describe(style)}" for name, style in self.styles.items()]
        return f"{len(each)} divided modules ({zlib.crc32(chr(10).join(each).encode()):08x})"

    def table(self, model: nn.Module) -> str:
        """A table of the modules' styles, of the model before it is cut. Equal layers share a row. Modules that have no
        own weights and stay whole are left out."""
        rows: dict[tuple[str, str], list[int]] = {}
        for name, module in model.named_modules():
            style = self.styles.get(name)
            own = sum(p.numel() for p in module.parameters(recurse=isinstance(style, Heads)))
            inside = name.rpartition(".")[0]
            if isinstance(self.styles.get(inside), Heads) or (style is None and not own):
                continue
            how = self.whole.get(name, "whole") if style is None else describe(style)
            usual = ".".join("*" if part.isdecimal() else part for part in name.split("."))
            rows.setdefault((usual or "(the model)", how), []).append(own)
        lines = [("module", "how", "modules", "parameters each")]
        for (name, how), sizes in rows.items():
            each = f"{sizes[0]:,}" if len(set(sizes)) == 1 else "various"
            lines.append((name, how, str(len(sizes)), each))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for name, how, number, each in lines:
            text.append(f"{name:<{widths[0]}}  {how:<{widths[1]}}  {number:>{widths[2]}}  {each:>{widths[3]}}")
        return "\n".join(text)


def describe(style: ParallelStyle) -> str:
    return style.describe() if isinstance(style, Style) else type(style).__name__


def read_tensor_parallel(
    styles: TensorParallelLike | None, model: nn.Module, *, count: int, example: Arguments | None = None
) -> TensorStyles:
    """Styles for the modules of a model that is not cut yet; None cuts nothing.

    Arguments:
        count: members of a tensor group.
        example: arguments of the model, with which "auto" finds how it calls modules that take more than one tensor.

    Raises ValueError for an unknown word or a pattern without a match, for two styles of one module, for a module that
    can't be cut so, and for a size that the members do not divide: each by name.
    """
    if styles is None or count == 1:
        return TensorStyles(count=count, styles={})
    if isinstance(styles, Mapping):
        return TensorStyles(count=count, styles=_in_order(model, _by_patterns(styles, model, count)))
    if styles != AUTO:
        raise ValueError(f"tensor_parallel={styles!r:.60}: expected {AUTO!r}, or {{'blocks.*.up': 'column', ...}}")
    return _automatic(model, count, example)


def _automatic(model: nn.Module, count: int, example: Arguments | None) -> TensorStyles:
    recogniser = Recogniser(count, model, example)
    styles: dict[str, ParallelStyle] = {}
    whole: dict[str, str] = {}
    planned: list[str] = []
    for where, base, plan in _published_plans(model):
        planned.append(where)
        own = _adapted({_join(where, name): style for name, style in _styles_of_plan(where, base, plan).items()}, model)
        _check_all(own, model, count)
        styles.update(own)
    shared = _shared_parameters(model)
    taken: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, LinearCrossEntropy) and name not in styles:
            style = Column(gather_output=True)
            if _holds(module, style, shared) or module.out_features % count:
                whole[name] = f"whole: {count} do not divide it, or its weight is another module's too"
            else:
                styles[name] = style
    for name, module in sorted(model.named_modules(), key=lambda each: -len(each[0].split(".")) if each[0] else 0):
        if any(not base or name == base or name.startswith(f"{base}.") for base in planned):
            continue
        region = recogniser.region(module, taken)
        if region is None:
            parts = [_join(name, child) for child, _ in module.named_children() if HEADS & vars(module).keys()]
            whole.update(dict.fromkeys(parts, "whole: its heads are not found to compute apart"))
            continue
        taken.update(module.get_submodule(below) for below in region if below)
        own = _adapted({_join(name, below): style for below, style in region.items()}, model)
        tied = next((each for each in own if _holds(model.get_submodule(each), own[each], shared)), None)
        if tied is not None:
            whole[tied] = "whole: its weight is another module's too"
            continue
        try:
            _check_all(own, model, count)
        except StyleError:
            if any(isinstance(style, Heads | Local) for style in own.values()):
                raise
            whole.update(dict.fromkeys(own, f"whole: {count} do not divide it"))
            continue
        styles.update(own)
    if not any(not isinstance(style, Local) for style in styles.values()):
        known = "".join(f"; {name!r} stays {why}" for name, why in list(whole.items())[:2])
        raise StyleError(
            f"tensor_parallel='auto' recognises nothing in this model that can be cut{known}: expected attention or "
            f"two Linear layers with an activation between them, or patterns as in tensor_parallel={{'blocks.*.up': "
            f"'column', 'blocks.*.down': 'row'}}"
        )
    return TensorStyles(count=count, styles=_in_order(model, styles), whole=whole)


def _published_plans(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    """(name, module, its plan by pattern below it) of each model in this one that has a plan."""
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        prefix, config = getattr(module, "base_model_prefix", None), getattr(module, "config", None)
        plan = getattr(config, "base_model_tp_plan", None)
        if not isinstance(prefix, str) or not plan:
            continue
        base = getattr(module, prefix, module) if prefix else module
        if isinstance(base, nn.Module) and base not in seen:
            seen.add(base)
            yield (f"{name}.{prefix}" if base is not module else name).strip("."), base, dict(plan)


def _styles_of_plan(where: str, base: nn.Module, plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """Styles by module name below `base`. An entry that matches nothing is for other sizes of the model. Raises
    StyleError for an unknown word, and for a needed one that is not supported."""
    named = {name: module for name, module in base.named_modules() if name}
    parameters = {name for name, _ in base.named_parameters()}
    found: dict[str, ParallelStyle] = {}
    cut: dict[str, dict[str, tuple[int, int]]] = {}  # of modules that hold parameters of experts
    for pattern, word in plan.items():
        known = (*_MODULES, *_WHOLE, *_NOT_RUN, *_GROUPS, "all_reduce", "mla_kv_a_proj")
        at = f"{where or 'the model'}: base_model_tp_plan[{pattern!r}] = {word!r}"
        if word not in known:
            raise StyleError(f"{at}: expected one of {', '.join(known)}, or tensor_parallel={{...}} of your own")
        modules = [name for name in named if matches(pattern, name)]
        single = [name for name in parameters if matches(pattern, name)]
        if not modules and not single:
            continue
        if word in _NOT_RUN or (single and word not in (*_PARAMETERS, *_WHOLE)):
            raise StyleError(f"{at} is not run: expected tensor_parallel={{...}} of your own for this model")
        for name in single if word in _PARAMETERS else ():
            owner, _, key = name.rpartition(".")
            cut.setdefault(owner, {})[key] = _PARAMETERS[word]
        style: ParallelStyle | None = None
        if word in _MODULES:
            style = _MODULES[word]()  # type: ignore[operator]
        elif word == "all_reduce":
            style = Summed()
        elif word == "mla_kv_a_proj":
            style = SharedKey(_rotary_width(at, base))
        found.update({name: style for name in modules if style is not None})
    for owner, tensors in cut.items():
        words = {word for pattern, word in plan.items() if matches(pattern, owner)}
        if "moe_tp_experts" not in words:
            raise StyleError(
                f"{where}: base_model_tp_plan cuts {', '.join(tensors)} of {owner!r}, which is no 'moe_tp_experts': "
                f"expected tensor_parallel={{...}} of your own for this model"
            )
        equal = (style for style in found.values() if isinstance(style, Experts) and style.parameters == tensors)
        found[owner] = next(equal, Experts(tensors))
    return found


def _rotary_width(at: str, base: nn.Module) -> int:
    width = getattr(getattr(base, "config", None), "qk_rope_head_dim", None)
    if not isinstance(width, int):
        raise StyleError(f"{at}: expected a config with qk_rope_head_dim")
    return width


def _by_patterns(patterns: Mapping[str, str | ParallelStyle], model: nn.Module, count: int) -> dict[str, ParallelStyle]:
    recogniser, words = Recogniser(count), _words(patterns, model)
    plain = {"column": Column(), "row": Row(), "sequence": Sequence(), "samples": Samples()}
    styles: dict[str, ParallelStyle] = {}
    for name, word in words.items():
        parent, _, child = name.rpartition(".")
        if isinstance(word, ParallelStyle):
            styles[name] = word
        elif word == "column" and isinstance(model.get_submodule(name), LinearCrossEntropy):
            styles[name] = Column(gather_output=True)
        elif word in ("sequence", "samples"):
            styles[name] = plain[word]
        elif isinstance(model.get_submodule(name), nn.MultiheadAttention):
            raise StyleError(f"module {name!r} is a MultiheadAttention: expected Heads(), or 'auto', for {word!r}")
        else:
            above = model.get_submodule(parent)
            region = recogniser.region(above)
            known = None if region is None else region.get(child)
            if region is None or known is None:
                _refuse_unknown_heads(name, above, parent)
                styles[name] = plain[word]
            else:
                styles.update(_of_region(name, word, parent, region, words))
    styles = _adapted(styles, model)
    _check_all(styles, model, count)
    for name in styles:
        outer = next((each for each in styles if f"{name}.".startswith(f"{each}.") and each != name), "")
        if isinstance(styles.get(outer), Samples):
            raise StyleError(
                f"module {name!r} is cut inside {outer!r}, of which each member computes other samples ('samples'): "
                f"expected one of them"
            )
    for name, word in words.items():
        if word == "column" and not isinstance(model.get_submodule(name), nn.Embedding):
            _refuse_alone(name, model, styles)
    _refuse_half_tied(model, styles)
    return styles


def _adapted(styles: Mapping[str, ParallelStyle], model: nn.Module) -> dict[str, ParallelStyle]:
    """Styles of modules that a LoRA adapter wraps (PEFT's base_layer): of Wx + BAx, W and B by columns, or W and A by
    rows."""
    found: dict[str, ParallelStyle] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if not isinstance(style, Column | Row) or "base_layer" not in module._modules:
            found[name] = style
            continue
        parts = {key for key, part in module.named_children() if any(True for _ in part.parameters())}
        if parts != {"base_layer", "lora_A", "lora_B"}:
            raise StyleError(
                f"module {name!r} is wrapped by an adapter of {', '.join(sorted(parts - {'base_layer'})) or 'none'}: "
                f"expected LoRA's lora_A and lora_B alone, or the weights merged (merge_and_unload())"
            )
        side = "lora_B" if isinstance(style, Column) else "lora_A"
        names = [f"{side}.{key}" for key, _ in module.get_submodule(side).named_children()]
        found.update({f"{name}.{each}": style for each in ("base_layer", *names)})
    return found


def _words(patterns: Mapping[str, str | ParallelStyle], model: nn.Module) -> dict[str, str | ParallelStyle]:
    words: dict[str, str | ParallelStyle] = {}
    said: dict[nn.Module, tuple[str, str]] = {}
    for pattern, word in patterns.items():
        if not isinstance(pattern, str):
            raise ValueError(f"tensor_parallel={{{pattern!r}: ...}}: expected names of modules, as in 'blocks.*.up'")
        if word not in WORDS and not isinstance(word, ParallelStyle):
            raise ValueError(
                f"tensor_parallel={{{pattern!r}: {word!r}}}: expected {', '.join(map(repr, WORDS))}, or a ParallelStyle"
            )
        for name, module in match(pattern, model, option=f"tensor_parallel={{{pattern!r}: ...}}").items():
            first, before = said.setdefault(module, (name, pattern))
            if before != pattern:
                raise StyleError(
                    f"tensor_parallel= has {before!r} and {pattern!r} for module {name!r}: expected one pattern for "
                    f"each module"
                )
            words[first] = word
    return words


def _of_region(
    name: str, word: str, parent: str, region: Region, words: Mapping[str, object]
) -> dict[str, ParallelStyle]:
    child = name.rpartition(".")[2]
    known = region[child]
    wanted = "column" if isinstance(known, Column) else "row"
    if word != wanted:
        raise StyleError(
            f"module {name!r} cannot be cut by {word!r}: expected {wanted!r}, as {parent!r} computes with it"
        )
    missing = [_join(parent, each) for each in region if each and _join(parent, each) not in words]
    if missing and "" in region:
        raise StyleError(
            f"module {name!r} is cut and {missing[0]!r} is not: expected {parent!r} with all of "
            f"{', '.join(filter(None, region))}"
        )
    return ({parent: region[""]} if "" in region else {}) | {name: known}


def _refuse_unknown_heads(name: str, parent: nn.Module, where: str) -> None:
    numbers = sorted(key for key in HEADS if isinstance(parent.__dict__.get(key), int))
    if numbers:
        raise StyleError(
            f"module {name!r} belongs to {where!r} ({type(parent).__name__}), which has {numbers[0]}="
            f"{parent.__dict__[numbers[0]]} and is not recognised: expected styles that say how its heads are divided, "
            f"as in {{{where!r}: Local({numbers[0]!r}), {name!r}: Column(blocks=3)}} for a fused projection"
        )


def _refuse_alone(name: str, model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    parent = name.rpartition(".")[0]
    siblings = [_join(parent, child) for child, _ in model.get_submodule(parent).named_children()]
    style = styles.get(name)
    others = [styles.get(each) for each in siblings]
    has_row = any(isinstance(other, Row) or not isinstance(other, Style | None) for other in others)
    if isinstance(style, Column) and not style.gather_output and not has_row:
        raise StyleError(
            f"module {name!r} is cut by 'column' and no module next to it by 'row', so that each process would "
            f"continue with its part: expected 'row' for the module that takes its outputs, or "
            f"Column(gather_output=True)"
        )


def _check_all(styles: Mapping[str, ParallelStyle], model: nn.Module, count: int) -> None:
    for name, style in styles.items():
        module = model.get_submodule(name)
        if not isinstance(style, Style):
            continue
        style.check(name, module, count)
        parent = model.get_submodule(name.removesuffix(".base_layer").rpartition(".")[0])
        width = parent.__dict__.get("head_dim")
        sizes = sizes_of(module)
        if isinstance(style, Column) and not style.gather_output and isinstance(width, int) and sizes is not None:
            own = sizes[1] - style.shared
            heads = own // (width * style.blocks)
            if own % (width * style.blocks) == 0 and heads % count:
                raise StyleError(not_divided(name, f"heads of {width}", heads, count, count))


def _refuse_half_tied(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    shared = _shared_parameters(model)
    for name, style in styles.items():
        other = _holds(model.get_submodule(name), style, shared)
        if other is not None:
            raise StyleError(
                f"module {name!r} is cut and its weight {' and '.join(map(repr, other))} is one tensor in two places: "
                f"expected modules whose weights are their own, or untied weights"
            )


def _shared_parameters(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {at: each for at, each in names.items() if len(each) > 1}


def _holds(module: nn.Module, style: ParallelStyle, shared: Mapping[int, list[str]]) -> list[str] | None:
    own = style.shards(module, index=0, count=1) if isinstance(style, Style) else dict(module.named_parameters())
    return next((shared[id(p)] for key in own if id(p := module.get_parameter(key)) in shared), None)


def _in_order(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    return {name: styles[name] for name, _ in model.named_modules() if name in styles}


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent and name else parent or name
