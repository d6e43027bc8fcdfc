"""Batches that are split and joined according to their field declarations, and single-transfer device copies.

A dataclass says of each field what its entries belong to; selecting, joining, padding, moving and checking follow:

    @dataclass
    class ImagePayload(Payload):
        prompts: list[str] = per_group()
        latents: Tensor = per_row()
        sigma: Tensor = per_decision()
        scores: Tensor | None = per_row(default=None)

A field holds a tensor, a numpy array, a list, a dictionary of those, or an object with its own `select(rows)`,
`concat(parts)` and `to(device)`. A batch lacks a field if it is None, or an empty list and the field has a default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import torch

if TYPE_CHECKING:
    from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, without gradient, with one transfer per device; CPU tensors are returned as they are."""
    found = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            by_device.setdefault(tensor.device, []).append(number)
    for numbers in by_device.values():
        # the widest entries first, so that each tensor starts at a multiple of its entry size
        numbers.sort(key=lambda number: -tensors[number].element_size())
        parts = [tensors[number].detach().contiguous().reshape(-1).view(torch.uint8) for number in numbers]
        copied = torch.cat(parts).cpu().split([len(part) for part in parts])
        for number, part in zip(numbers, copied, strict=True):
            found[number] = part.clone().view(tensors[number].dtype).view(tensors[number].shape)
    return found


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device; a GPU copies it in stream order, without blocking."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]` (R, ...) of x (N, ...) for rows (R,) int64, with a gradient whose bits repeat.

    Plain indexing adds the gradients of a repeated row in the order in which CPU threads reach it.
    """
    # the gradient of an embedding is added in the order of the index, on GPUs too
    return torch.nn.functional.embedding(index, x[:, None].flatten(1)).view(len(index), *x.shape[1:])


def numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Convert scalars to Python numbers with one transfer."""
    copied = iter(to_host([value for value in values if isinstance(value, torch.Tensor)]))
    return [float(next(copied) if isinstance(value, torch.Tensor) else value) for value in values]


def sum_of_bits(weight: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's eight-byte words, modulo 2^64, and of the remaining bytes."""
    data = weight.contiguous().view(-1).view(torch.uint8)
    words, rest = data.split([len(data) // 8 * 8, len(data) % 8])
    if words.storage_offset() * words.element_size() % 8:  # a part of a larger tensor: not aligned
        words = words.clone()
    return words.view(torch.int64).sum() + rest.sum()


_Kind = Literal["row", "decision", "group", "shared", "nested"]
# a unique object, since None and [] are valid blanks
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Layout:
    """Axis of a field's entries."""

    kind: _Kind
    padding: float = 0.0
    """Value that fills missing decisions of a row."""
    blank: Any = _REQUIRED
    """Entry used for a part without the field if another part has it; if unset, all parts need the field."""
    optional: bool = False
    """Whether an empty list means that the batch does not have the field."""


def per_row(*, blank: Any = _REQUIRED, **options: Any) -> Any:
    """A field with one entry per row: (B, ...) or a list of B.

    Args:
        blank: for lists, the entry of rows whose part lacks the field when parts are joined.
        options: `default` or `default_factory`, as for `dataclasses.field`.
    """
    return _declare(Layout("row", blank=blank), options)


def per_group(*, blank: Any = _REQUIRED, **options: Any) -> Any:
    """A field with one entry per group: (N, ...) or a list of N; arguments as for `per_row`."""
    return _declare(Layout("group", blank=blank), options)


def per_decision(*, padding: float = 0.0, **options: Any) -> Any:
    """A field with one entry per decision: (B, T, ...).

    Args:
        padding: fills the second axis up to the longest part when parts are joined; tensors of one axis stay.
        options: as for `per_row`.
    """
    return _declare(Layout("decision", padding=padding), options)


def shared(**options: Any) -> Any:
    """A field shared by all rows; when parts are joined, the first part's value is kept."""
    return _declare(Layout("shared"), options)


def nested(**options: Any) -> Any:
    """A field that is itself a batch of the same rows and groups."""
    return _declare(Layout("nested"), options)


class Carrier(Protocol):
    """An object with a payload, such as `Rollouts`."""

    @property
    def payload(self) -> Payload | None:
        """Data of the domain."""


@dataclass
class Payload:
    """Domain-specific data for B rows in N groups, which only the domain's own code opens.

    A subclass is a dataclass that declares each field with `per_row`, `per_group`, `per_decision` or `shared`.

    Raises:
        ValueError: the fields disagree on the number of rows or of groups.
    """

    def __post_init__(self) -> None:
        # the first field with entries sets the count; every other field has to agree with it
        counts = _counts(self)
        for kind, count in counts.items():
            for name, entries in _lengths(self, kind):
                if entries != count:
                    rows, groups = counts.get("row", "no"), counts.get("group", "no")
                    raise ValueError(f"{name} has {entries} entries; there are {rows} rows in {groups} groups.")

    @classmethod
    def of(cls, rollouts: Carrier) -> Self:
        """Return the payload of rollouts.

        Raises:
            TypeError: it is of another class, or there is none.
        """
        payload = rollouts.payload
        # a recipe that is given another domain's rollouts fails here, not at a missing attribute
        if not isinstance(payload, cls):
            found = "no payload" if payload is None else f"a {type(payload).__name__}"
            raise TypeError(f"these rollouts have {found}; a {cls.__name__} is needed.")
        return payload

    def check_counts(self, rows: int, groups: int) -> None:
        """Raise ValueError unless the payload has `rows` rows in `groups` groups."""
        found = _counts(self)
        # a payload without any field of a kind agrees with every count
        if found.get("row", rows) != rows or found.get("group", groups) != groups:
            has = " and ".join(f"{count} {kind}s" for kind, count in found.items())
            raise ValueError(f"{type(self).__name__} has {has}; the rollouts have {rows} rows in {groups} groups.")

    def select(self, rows: Tensor, groups: Tensor) -> Self:
        """Keep rows (b,) and groups (n,), both int64 indices, in the order given."""
        return dataclasses.replace(self, **select_fields(self, rows, groups))

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join payloads: the rows and the groups of each part follow those of the part before."""
        return dataclasses.replace(parts[0], **join_fields(parts))

    def to(self, device: torch.device | str) -> Self:
        """Move the tensors to a device."""
        return dataclasses.replace(self, **move_fields(self, device))


def select_fields(batch: Any, rows: Tensor, groups: Tensor) -> dict[str, Any]:
    """Select rows and groups of every field of a batch."""
    # shared by all fields, so that each form of the index is made once
    by_row, by_group = _Index(rows), _Index(groups)
    taken: dict[str, Callable[[Any], Any]] = {
        "row": by_row.take,
        "decision": by_row.take,
        "group": by_group.take,
        # a nested batch has the rows and groups of the batch around it, so the same indices hold
        "nested": lambda part: part.select(rows, groups),
        "shared": lambda value: value,
    }
    return {name: _mapped(taken[layout.kind], value) for name, layout, value in _fields(batch)}


def join_fields(parts: Sequence[Any]) -> dict[str, Any]:
    """Join every field of some batches; decisions are padded to the longest part."""
    # checked before anything is joined: a missing field would otherwise shift the entries of later parts
    _check_choice_of_fields([_required(part) for part in parts])
    counts = [_counts(part) for part in parts]
    joined = {}
    for name, layout, _ in _fields(parts[0]):
        # a per-decision field has one entry a row, and T is settled by padding
        sizes = [count.get("row" if layout.kind == "decision" else layout.kind, 0) for count in counts]
        joined[name] = _join([getattr(part, name) for part in parts], layout, sizes)
    return joined


def move_fields(batch: Any, device: torch.device | str) -> dict[str, Any]:
    """Move the tensors of every field, including list entries, to a device; returns the values by field."""
    # to the CPU in one transfer: a copy per field would make a GPU wait as often as there are fields
    if torch.device(device).type == "cpu":
        leaves = [leaf for _, _, value in _values(batch) for leaf in (value if isinstance(value, list) else [value])]
        # a tensor that needs its gradient is moved by itself, since to_host detaches
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.requires_grad]
        copied = {id(tensor): copy for tensor, copy in zip(tensors, to_host(tensors), strict=True)}
    else:
        copied = {}
    return {name: _mapped(lambda value: _move(value, device, copied), value) for name, _, value in _fields(batch)}


def trim_fields(batch: Any, width: int) -> dict[str, Any]:
    """Cut every per-decision field to `width` decisions; returns the values by field."""

    def cut(value: Any) -> Any:
        # per-row entries of a dictionary such as extras have no decision axis
        return value if value.ndim == 1 else value[:, :width]

    return {name: _mapped(cut, value) for name, layout, value in _fields(batch) if layout.kind == "decision"}


class _Index:
    """Row or group numbers in the form that each kind of field wants; each form is made once."""

    def __init__(self, index: Tensor) -> None:
        # by device: a payload may hold CPU and GPU tensors, and the index has to be where the values are
        self._by_device = {index.device: index}
        self.index = index

    @cached_property
    def places(self) -> list[int]:
        return self.index.tolist()

    def take(self, value: Any) -> Any:
        # the same index tensor for all fields on a device: one transfer instead of one per field
        if isinstance(value, torch.Tensor):
            if value.device not in self._by_device:
                self._by_device[value.device] = to_device(self.index, value.device)
            return value[self._by_device[value.device]]
        if isinstance(value, list):
            # an empty list is a field that the batch lacks, not one of 0 rows
            return [value[place] for place in self.places] if value else value
        return value[self.index.cpu().numpy()] if _is_array(value) else value.select(self.index)


def _declare(layout: Layout, options: dict[str, Any]) -> Any:
    # only a list can be absent by being empty; an absent tensor is None
    layout = dataclasses.replace(layout, optional=options.get("default_factory") is list)
    return dataclasses.field(metadata={"layout": layout}, **options)


@cache
def _layouts(kind: type[Any]) -> dict[str, Layout]:
    found: dict[str, Layout] = {}
    plain = []
    for item in dataclasses.fields(kind):
        if "layout" in item.metadata:
            found[item.name] = item.metadata["layout"]
        else:
            plain.append(item.name)
    # a field of unknown axis could neither be selected nor joined, so a class that has one is rejected on first use
    if plain:
        raise TypeError(
            f"{kind.__name__} does not declare what the entries of {', '.join(plain)} belong to; "
            "use per_row(), per_group(), per_decision(), shared() or nested()."
        )
    return found


def _fields(batch: Any) -> Iterator[tuple[str, Layout, Any]]:
    for name, layout in _layouts(type(batch)).items():  # type: ignore[arg-type]
        yield name, layout, getattr(batch, name)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to each entry of a dictionary; None stays."""
    if isinstance(value, Mapping):
        # entries are mapped by themselves: reward terms and extras are dictionaries of tensors
        return {key: _mapped(function, entry) for key, entry in value.items()}
    return None if value is None else function(value)


def _values(batch: Any) -> Iterator[tuple[str, Layout, Any]]:
    """(name, layout, value) of what a batch has; entries of dictionaries one by one."""
    for name, layout, value in _fields(batch):
        if isinstance(value, Mapping):
            yield from ((f"{name}[{key}]", layout, entry) for key, entry in value.items() if entry is not None)
        # absent fields are passed over, so that they take no part in counts and checks
        elif value is not None and not (layout.optional and not value):
            yield name, layout, value


def _lengths(batch: Any, kind: str) -> Iterator[tuple[str, int]]:
    # a per-decision field also has one entry a row
    kinds = ("row", "decision") if kind == "row" else (kind,)
    return ((name, len(value)) for name, layout, value in _values(batch) if layout.kind in kinds)


def _counts(batch: Any) -> dict[str, int]:
    """Number of rows and of groups, each by the first field that has entries for them."""
    first = {kind: next(_lengths(batch, kind), None) for kind in ("row", "group")}
    return {kind: found[1] for kind, found in first.items() if found is not None}


def _required(batch: Any) -> set[str]:
    """Names of what a batch has and every batch that it is joined with must have too."""
    # a field with a blank may be missing in some parts, and a shared one is taken from the first part
    return {name for name, layout, _ in _values(batch) if layout.blank is _REQUIRED and layout.kind != "shared"}


def _join(values: Sequence[Any], layout: Layout, sizes: Sequence[int]) -> Any:
    if layout.kind == "shared":
        # all rows of a run share it, so it is the same object in every part
        return values[0]
    if any(isinstance(value, Mapping) for value in values):
        # dict.fromkeys keeps the order in which keys first occur, so that joins in any process give the same order
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _join([value.get(key) for value in values], layout, sizes) for key in keys}
    if layout.blank is not _REQUIRED and any(values):
        # a part that lacks the field gets one blank a row, so that later rows keep their entries
        values = [value or [layout.blank] * size for value, size in zip(values, sizes, strict=True)]
    # fields that all parts must have are either in all of them or in none, as checked in join_fields
    first = values[0]
    if first is None:
        return None
    if isinstance(first, list):
        return [entry for value in values for entry in value]
    if isinstance(first, torch.Tensor):
        return torch.cat(_padded(list(values), layout))
    # through torch, which pads; numpy shares the memory both ways, so nothing is copied twice
    if _is_array(first):
        return torch.cat(_padded([torch.from_numpy(value) for value in values], layout)).numpy()
    return type(first).concat(values)


def _padded(tensors: list[Tensor], layout: Layout) -> list[Tensor]:
    # one-dimensional: a per-row entry among the extras, which has no decisions to pad
    if layout.kind != "decision" or tensors[0].dim() == 1:
        return tensors
    width = max(tensor.shape[1] for tensor in tensors)
    return [_pad(tensor, width - tensor.shape[1], layout.padding) for tensor in tensors]


def _pad(tensor: Tensor, missing: int, value: float) -> Tensor:
    if not missing:
        return tensor
    # functional.pad counts from the last axis: no padding there, then the missing decisions of axis 1
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing), value=value)


def _move(value: Any, device: torch.device | str, copied: Mapping[int, Tensor]) -> Any:
    if isinstance(value, list):
        return [_move(entry, device, copied) for entry in value]
    # by identity: the same tensor may be in several fields, and was copied once
    if id(value) in copied:
        return copied[id(value)]
    if isinstance(value, torch.Tensor):
        return to_device(value, device)
    # strings, numbers and images without `to` stay where they are
    return value.to(device) if hasattr(value, "to") else value


def _is_array(value: Any) -> bool:
    # by name, so that the core does not import numpy
    return type(value).__module__ == "numpy"


def _check_choice_of_fields(present: Sequence[set[str]]) -> None:
    """Check that all rollouts to be joined carry the same optional fields."""
    everywhere = set.intersection(*present)
    somewhere = set.union(*present)
    if everywhere != somewhere:
        raise ValueError(
            "concat requires the same fields in every part; only some parts have "
            f"{sorted(somewhere - everywhere)}. Add them to the others or set them to None before joining."
        )
