"""The static description of where every leaf lives: the only place that knows offsets.

``optax.flatten`` concatenates the raveled leaves anew at every call and knows no more about
them. A `FlatLayout` is built once from shapes, dtypes and paths, keeps leaves of one group and
dtype together, aligned, each in its region, and says where each of them is.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from fusedopt.grouping import REGIONS
from fusedopt.paths import Path, show
from pallas_kernels.tiling import BLOCK, ROW

# Kernels index with int32; the last block of a bucket must still be addressable.
MAX_BUCKET = 2**31 - BLOCK


@dataclasses.dataclass(frozen=True)
class Packing:
    """How leaves become buckets.

    Attributes:
      solo_from: leaves of at least this many elements are buckets of their own ("solo") and keep
        their shape; smaller ones share a packed bucket with their group and dtype. None packs
        everything. Packing a leaf costs two more memory accesses of it, leaving it alone one more
        kernel.
      align: every packed leaf starts at a multiple of this many elements (and of 128).
      shards: packed buckets end so that they can be cut into this many shards of whole blocks, as `zero1` does.
    """

    solo_from: int | None = 16384
    align: int = ROW
    shards: int = 1

    def __post_init__(self):
        if self.solo_from is not None and (not isinstance(self.solo_from, int) or self.solo_from < 1):
            raise ValueError(f"`solo_from`: expected None or a positive int, got {self.solo_from!r}")
        if not isinstance(self.align, int) or self.align < ROW or BLOCK % self.align:
            raise ValueError(f"`align`: expected a multiple of {ROW} that divides {BLOCK}, got {self.align!r}")
        if not isinstance(self.shards, int) or self.shards < 1:
            raise ValueError(f"`shards`: expected a positive int, got {self.shards!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A leaf's place: `size` elements from `offset` of bucket `bucket`, `padding` zeros behind.

    Attributes:
      path: key strings from the root of the tree to the leaf.
      region, group: what kind of leaf it is, and whose hyperparameters it has.
      shape, dtype: the leaf's own.
      bucket: index among the buckets of the layout.
      offset, size, padding: in elements.
      leaf: index among the leaves of the tree, ``None`` leaves counted.
    """

    path: Path
    region: str
    group: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bucket: int
    offset: int
    size: int
    padding: int
    leaf: int


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """One contiguous buffer: leaves of one group and dtype, or one large leaf in its own shape.

    Attributes:
      name: unique; ``<group>.<dtype>``, with the leaf's path for a solo bucket.
      shape: ``(n,)`` with n a multiple of the block, or the leaf's own shape if `solo`.
      first, last: the half-open range of its segments in `FlatLayout.segments`.
      decays, trust, frozen: what the group and the masks say of all its leaves.
    """

    name: str
    group: str
    dtype: np.dtype
    shape: tuple[int, ...]
    solo: bool
    decays: bool
    trust: bool
    frozen: bool
    first: int
    last: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FlatLayout:
    """Buckets, segments and the structure of the tree. Immutable, hashable, interned.

    Attributes:
      treedef: structure of the parameters, ``None`` leaves counted.
      segments: one a trainable leaf, in memory order.
      buckets: in memory order: groups in their order, packed leaves before solo ones.
      others: indices of the leaves that are carried along (integers, booleans, None).
      absent: those of `others` that are None.
      align: alignment of packed segments, in elements.
    """

    treedef: Any
    segments: tuple[Segment, ...]
    buckets: tuple[Bucket, ...]
    others: tuple[int, ...]
    absent: frozenset[int]
    align: int

    @functools.cached_property
    def digest(self) -> bytes:
        # jit compares layouts at every call: 16 bytes, not thousands of strings.
        # A segment's group, dtype and padding follow from its bucket and size.
        places = [(s.path, s.region, s.shape, s.bucket, s.offset, s.leaf) for s in self.segments]
        text = repr((str(self.treedef), places, self.buckets, self.others, sorted(self.absent), self.align))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    @functools.cached_property
    def fingerprint(self) -> str:
        """8 hex digits that say which leaf lies where, and nothing of groups: checkpoints of `FlatParams` carry it."""
        places = [(s.path, s.shape, s.dtype.name, s.bucket, s.offset) for s in self.segments]
        text = repr((places, [b.shape for b in self.buckets], len(self.others) - len(self.absent)))
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def difference(self, other: FlatLayout) -> str:
        """How the places of leaves differ in words, naming the first few leaves; "" if they lie alike.

        Args:
          other: the layout to compare with; the text calls this one the first and `other` the second.
        """
        ours, theirs = ({s.path: s for s in layout.segments} for layout in (self, other))
        found = [f"`{show(p)}` only in the first" for p in ours if p not in theirs]
        found += [f"`{show(p)}` only in the second" for p in theirs if p not in ours]
        for path, s in ours.items():
            t = theirs.get(path, s)
            here, there = self.buckets[s.bucket], other.buckets[t.bucket]
            if (s.shape, s.dtype) != (t.shape, t.dtype):
                found.append(f"`{show(path)}` is {s.dtype} {s.shape} in the first, {t.dtype} {t.shape} in the second")
            elif (s.bucket, s.offset) != (t.bucket, t.offset):
                found.append(
                    f"`{show(path)}` begins at element {s.offset} of `{here.name}` in the first, "
                    f"at {t.offset} of `{there.name}` in the second"
                )
        for b, c in zip(self.buckets, other.buckets):
            if b.shape != c.shape:
                found.append(f"bucket `{b.name}` has shape {b.shape} in the first, `{c.name}` {c.shape} in the second")
        return "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")

    def __hash__(self) -> int:
        return int.from_bytes(self.digest[:8], "little")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, FlatLayout) and self.digest == other.digest

    def __reduce__(self):
        fields = dataclasses.fields(self)
        return intern_new, tuple(getattr(self, f.name) for f in fields)

    @property
    def num_leaves(self) -> int:
        """Leaves of the tree, those that are carried along counted."""
        return len(self.segments) + len(self.others)

    def segments_of(self, bucket: Bucket) -> tuple[Segment, ...]:
        """The segments of a bucket, in memory order."""
        return self.segments[bucket.first : bucket.last]

    def sizes_of(self, bucket: Bucket) -> tuple[int, ...]:
        """Elements of each segment of a bucket, padding not counted."""
        return tuple(s.size for s in self.segments_of(bucket))

    @functools.cached_property
    def size(self) -> int:
        """Number of trainable elements, padding not counted."""
        return sum(s.size for s in self.segments)

    @functools.cached_property
    def padding(self) -> int:
        """Number of padding elements in all buckets."""
        return sum(b.size for b in self.buckets) - self.size

    def segment(self, path: Sequence[str]) -> Segment:
        """The segment of the leaf at `path`.

        Raises:
          KeyError: there is none.
        """
        wanted = tuple(path)
        for s in self.segments:
            if s.path == wanted:
                return s
        raise KeyError(f"no trainable leaf at `{show(wanted)}`")

    def region_range(self, first: str, last: str | None = None) -> list[tuple[str, int, int]]:
        """Where the regions from `first` to `last` lie: ``[(bucket name, offset, size), ...]``.

        Sizes include the padding between segments. One entry when the run is contiguous, which
        it is for regions of one group and dtype when everything is packed.

        Raises:
          ValueError: unknown region, or `last` before `first`.
        """
        last = first if last is None else last
        for name, value in (("first", first), ("last", last)):
            if value not in REGIONS:
                raise ValueError(f"`{name}`: expected one of {REGIONS}, got {value!r}")
        lo, hi = REGIONS.index(first), REGIONS.index(last)
        if lo > hi:
            raise ValueError(f"`last`={last!r} comes before `first`={first!r} in {REGIONS}")
        runs: list[tuple[str, int, int]] = []
        for s in self.segments:
            if not lo <= REGIONS.index(s.region) <= hi:
                continue
            name, end = self.buckets[s.bucket].name, s.size + s.padding
            if runs and runs[-1][0] == name and runs[-1][1] + runs[-1][2] == s.offset:
                runs[-1] = (name, runs[-1][1], runs[-1][2] + end)
            else:
                runs.append((name, s.offset, end))
        return runs

    def __str__(self) -> str:
        head = ("path", "region", "group", "bucket", "shape", "offset", "size", "padding")
        rows = [
            (
                show(s.path),
                s.region,
                s.group,
                self.buckets[s.bucket].name,
                str(s.shape),
                str(s.offset),
                str(s.size),
                str(s.padding),
            )
            for s in self.segments
        ]
        widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]

        def line(cells):
            text = (c.ljust(w) if i < 5 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
            return "  ".join(text).rstrip()

        total = (
            f"{len(self.segments)} leaves, {self.size} elements in {len(self.buckets)} buckets, "
            f"{self.padding} of padding (ends of buckets included), {len(self.others)} leaves carried along"
        )
        return "\n".join([line(head), *(line(r) for r in rows), total])

    def __repr__(self) -> str:
        return (
            f"FlatLayout({len(self.segments)} leaves, {self.size} elements, "
            f"{len(self.buckets)} buckets, {self.digest.hex()[:8]})"
        )


_pool: weakref.WeakValueDictionary[bytes, FlatLayout] = weakref.WeakValueDictionary()


def intern(layout: FlatLayout) -> FlatLayout:
    """One object per layout, so that jit's comparisons end at `is`."""
    return _pool.setdefault(layout.digest, layout)


def intern_new(*args: Any) -> FlatLayout:
    return intern(FlatLayout(*args))
