"""The cases of the emulated machine: exchanges of many kinds, and messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raymoe.errors import DataRefused
from raymoe.transport.copy_kernel import Ring, Spread
from tests.emulator.build import Change
from tests.emulator.copies import Mail, Message
from tests.emulator.machine import Emulator
from tests.emulator.ranks import backend, deep, long_pieces, narrow, small, spec_for, workspaces
from tests.emulator.steps import Steps
from tests.unit.exchange.exchange_cases import Case

FP8 = "float8_e4m3"
ROUTINGS = ("uniform", "skewed", "masked", "none", "repeated", "one")


@dataclass(frozen=True)
class Run:
    """A kind of backend, and the settings of a run; `spec` has fields of the ExchangeSpec by name."""

    kind: str
    ranks: int = 2
    shape: Any = small
    form: str = "whole"
    spec: dict[str, Any] = field(default_factory=dict)
    stamped: bool = True
    routings: tuple[str, ...] = ROUTINGS
    weighted: bool = True
    changes: tuple[Change, ...] = ()
    most_steps: int = 20_000_000
    torn_lines: bool = False

    def judged(self, seed: int) -> int:
        """Run all steps in the interleaving of a seed, and judge them; return the number of switches."""
        case = Case(
            self.ranks,
            spec_for(self.kind, **self.spec),
            "auto",
            self.routings,
            seed=seed,
            prefix=seed % 2 == 0,
            wide_topk_idx=seed % 3 != 0,
            weighted=self.weighted,
        )
        with Emulator(self.ranks, self.most_steps, self.changes, self.torn_lines) as emulator:
            spaces = workspaces(emulator, case.spec, stamped=self.stamped)
            steps = Steps(emulator, case, [backend(self.kind, space, case.spec, self.shape) for space in spaces])
            for step in range(len(self.routings)):
                steps.enqueue(step, self.form)
            emulator.run(seed)
            steps.judge()
            return emulator.steps


def refused(kind: str, seed: int, changes: tuple[Change, ...] = ()) -> None:
    """Run a step whose rows do not fit, which all ranks must refuse, with good steps before and after it."""
    spec = spec_for(kind, capacity=64, alignment=1)
    case = Case(2, spec, "auto", ("masked", "one", "masked"), ragged=False, seed=3)
    with Emulator(2, 3_000_000, changes) as emulator:
        spaces = workspaces(emulator, spec)
        steps = Steps(emulator, case, [backend(kind, space, spec, small) for space in spaces])
        for last in (1, 2):
            for step in range(len(steps.results), last + 1):
                steps.enqueue(step)
            emulator.run(seed)
            for each in steps.backends if last == 1 else ():
                try:
                    each.check()
                except DataRefused:
                    continue
                raise AssertionError(f"rank {each.world.rank} does not refuse the step")
        steps.judge(first=2)


KINDS = ("fused", "staged", "copied", "ll")
RUNS: dict[str, Run] = {
    **{f"{kind} on {ranks}": Run(kind, ranks) for kind in KINDS for ranks in (1, 2, 3)},
    **{
        f"{kind} on {ranks}": Run(
            kind, ranks, spec={"tokens": 6, "experts": 2 * ranks}, routings=("uniform", "skewed", "masked")
        )
        for kind in KINDS
        for ranks in (5, 8)
    },
    **{f"halves of {kind}": Run(kind, 3, form="halves") for kind in ("fused", "copied", "ll")},
    "halves of staged": Run("staged", 2, None, "halves", {"hidden": 1000}),
    **{f"pairs of {kind}": Run(kind, 3, form="pairs") for kind in KINDS},
    **{f"{kind}, known routing": Run(kind, 3, form="known") for kind in ("fused", "staged")},
    **{
        f"{kind}, {form}, layout {layout}": Run(
            kind, 2, form=form, spec={"layout": layout, "padding": "zero", "alignment": 8}
        )
        for kind in ("fused", "staged")
        for layout, form in (("expert", "known pairs"), ("rank", "known"))
    },
    "fused, known routing on 8": Run(
        "fused", 8, form="known", spec={"tokens": 6, "experts": 16}, routings=("uniform", "skewed", "masked")
    ),
    "fused, known routing, narrow": Run("fused", 3, narrow, "known", {"tokens": 40}),
    "fused, known routing, 16 of 16": Run("fused", form="known", spec={"topk": 16, "experts": 16}),
    "fused, known routing, 2000 bytes": Run("fused", form="known", spec={"hidden": 1000, "tokens": 9}),
    "fused, known routing, grid of a GPU": Run("fused", shape=None, form="known", stamped=False),
    "staged, known routing, grid of a GPU": Run("staged", shape=None, form="known", stamped=False),
    **{f"narrow {kind}": Run(kind, 3, narrow, spec={"tokens": 40}) for kind in ("fused", "staged")},
    **{f"rings of {stages}": Run("fused", 2, deep(stages), spec={"tokens": 48}) for stages in (1, 5, 16)},
    **{f"{kind}, grid of a GPU": Run(kind, shape=None, stamped=False) for kind in KINDS},
    **{f"{kind}, layout rank": Run(kind, 3, spec={"layout": "rank"}) for kind in ("fused", "staged", "copied")},
    "copied, layout rank, zeros in gaps": Run("copied", spec={"layout": "rank", "padding": "zero", "alignment": 8}),
    **{f"{kind}, zeros in gaps": Run(kind, spec={"padding": "zero", "alignment": 8}) for kind in ("fused", "ll")},
    **{f"{kind}, 16 of 16": Run(kind, spec={"topk": 16, "experts": 16}) for kind in ("fused", "ll")},
    "ll, counting blocks of many runs": Run("ll", spec={"hidden": 8, "tokens": 448, "topk": 16, "experts": 16}),
    **{f"{kind}, 16 bytes": Run(kind, 3, spec={"hidden": 8, "alignment": 1}) for kind in KINDS},
    **{f"{kind}, 2000 bytes": Run(kind, spec={"hidden": 1000, "tokens": 9}) for kind in KINDS},
    **{f"{kind}, float32": Run(kind, spec={"hidden": 20, "dtype": "float32"}) for kind in ("fused", "ll")},
    **{f"{kind}, float16": Run(kind, spec={"dtype": "float16"}, weighted=False) for kind in ("fused", "ll")},
    **{
        f"{kind}, fp8 to {dtype}": Run(kind, spec={"wire": FP8, "dtype": dtype, "hidden": 264, "tokens": 9})
        for kind in ("fused", "staged", "ll")
        for dtype in ("bfloat16", "float16", "float32")
    },
    **{
        f"fused, fp8 of more than 32 blocks of {dtype}": Run(
            "fused", spec={"wire": FP8, "dtype": dtype, "hidden": hidden, "tokens": 2}, routings=("uniform", "masked")
        )
        for dtype, hidden in (("bfloat16", 4360), ("float32", 4228))
    },
    **{
        f"{kind}, {steps} steps a piece": Run(kind, 3, long_pieces, form, {"hidden": 1024 * steps - 24, "tokens": 7})
        for kind, form, steps in (("fused", "pairs", 2), ("fused", "whole", 5), ("staged", "pairs", 3))
    },
    "fused, float32 returned as bfloat16": Run(
        "fused", 3, spec={"hidden": 20, "dtype": "float32", "wire": {"combine": "bfloat16"}}
    ),
    "staged, float32 returned as float16, pieces": Run(
        "staged", shape=None, spec={"hidden": 1500, "dtype": "float32", "wire": {"combine": "float16"}, "tokens": 5}
    ),
    "fused, bfloat16 returned as float32": Run("fused", spec={"hidden": 1000, "wire": {"combine": "float32"}}),
    "fused, fp8 there, float16 returned as bfloat16": Run(
        "fused", spec={"hidden": 264, "dtype": "float16", "wire": {"dispatch": FP8, "combine": "bfloat16"}, "tokens": 9}
    ),
    **{
        f"{kind}, fp8 raw, layout {layout}": Run(
            kind, 3, spec={"wire": FP8, "output": "raw", "layout": layout, "hidden": 272, "padding": "zero"}
        )
        for kind, layout in (
            ("fused", "expert"),
            ("fused", "rank"),
            ("staged", "expert"),
            ("staged", "rank"),
            ("ll", "expert"),
        )
    },
    **{
        f"{kind}, groups of {group} at {alignment}, layout {layout}, padding {padding}": Run(
            kind,
            spec={"expert_group": group, "alignment": alignment, "layout": layout, "padding": padding},
        )
        for kind, group, alignment, layout, padding in (
            ("fused", 2, 8, "expert", "zero"),
            ("fused", 3, 5, "expert", "any"),
            ("fused", 3, 128, "rank", "zero"),
            ("fused", 2, 5, "rank", "any"),
            ("staged", 3, 8, "expert", "any"),
            ("staged", 2, 128, "expert", "zero"),
            ("staged", 3, 5, "rank", "zero"),
            ("ll", 3, 8, "expert", "zero"),
            ("ll", 2, 128, "expert", "any"),
            ("ll", 6, 5, "expert", "zero"),
        )
    },
    **{
        f"{kind}, known routing, groups of 3": Run(
            kind, form="known pairs", spec={"expert_group": 3, "alignment": 8, "padding": "zero"}
        )
        for kind in ("fused", "staged")
    },
    **{
        f"{kind}, fp8 raw, groups of 2": Run(
            kind, spec={"wire": FP8, "output": "raw", "hidden": 272, "expert_group": 2, "alignment": 8}
        )
        for kind in ("fused", "ll")
    },
    # More experts than threads of a block, in groups of more and of fewer experts than a thread has.
    **{
        f"{kind}, groups of {group} of 1020": Run(
            kind, 1, spec={"experts": 1020, "topk": 16, "expert_group": group, "alignment": 3, "hidden": 8}
        )
        for kind, group in (("fused", 3), ("ll", 5))
    },
    **{f"few on {ranks}": Run("few", ranks) for ranks in (1, 2, 3)},
    **{f"{form} of few": Run("few", 3, form=form) for form in ("halves", "pairs", "known")},
    "narrow few": Run("few", 3, narrow, spec={"tokens": 40}),
    "few on 8": Run("few", 8, spec={"tokens": 6, "experts": 16}, routings=("uniform", "skewed", "masked")),
    "few, grid of a GPU": Run("few", shape=None, stamped=False),
    "few, known routing, grid of a GPU": Run("few", shape=None, form="known", stamped=False),
    "few, layout rank": Run("few", 3, spec={"layout": "rank"}),
    "few, layout rank, grid of a GPU": Run("few", 2, shape=None, spec={"layout": "rank"}, stamped=False),
    "few, 16 of 16": Run("few", spec={"topk": 16, "experts": 16}),
    "few, 16 bytes": Run("few", 3, spec={"hidden": 8, "alignment": 1}),
    "few, 2000 bytes": Run("few", spec={"hidden": 1000, "tokens": 9}),
    "few, float32": Run("few", spec={"hidden": 20, "dtype": "float32"}),
    **{
        f"few, fp8 of {dtype}": Run(
            "few", 3, spec={"wire": FP8, "output": "raw", "dtype": dtype, "hidden": 272, "tokens": 9}
        )
        for dtype in ("bfloat16", "float16", "float32")
    },
    **{
        f"few, fp8 raw, layout {layout}{', grid of a GPU' * (shape is None)}": Run(
            "few", 2, shape, spec={"wire": FP8, "output": "raw", "layout": layout, "hidden": 272}, stamped=False
        )
        for layout in ("expert", "rank")
        for shape in (small, None)
    },
    "narrow few, fp8": Run("few", 3, narrow, spec={"wire": FP8, "output": "raw", "hidden": 272, "tokens": 40}),
    **{
        f"{form} of few, fp8": Run("few", 3, form=form, spec={"wire": FP8, "output": "raw", "hidden": 272})
        for form in ("halves", "pairs")
    },
    **{f"few, rings of {stages}": Run("few", 2, deep(stages), spec={"tokens": 48}) for stages in (1, 5)},
    **{f"few ll on {ranks}": Run("few ll", ranks) for ranks in (1, 2, 3)},
    "few ll on 8": Run("few ll", 8, spec={"tokens": 6, "experts": 16}, routings=("uniform", "skewed", "masked")),
    "few ll, many turns": Run("few ll", 3, spec={"tokens": 70, "hidden": 1000}, routings=("uniform", "masked")),
    "few ll, counting blocks of many runs": Run(
        "few ll", spec={"hidden": 8, "tokens": 200, "topk": 16, "experts": 16}, routings=("uniform", "masked")
    ),
    "few ll, fp8": Run("few ll", spec={"wire": FP8, "hidden": 264, "tokens": 20, "padding": "zero", "alignment": 8}),
    "pairs of few ll": Run("few ll", 3, form="pairs"),
}

MESSAGES = (
    *(Message(0), Message(1, 3, 3), Message(15, 0, 7), Message(16), Message(64, 16, 32), Message(1000, 5, 21)),
    *(Message(777, 2, 13), Message(33, 15, 0), Message(1024), Message(129, 1, 1)),
)
SPREADS = {
    "own blocks": Spread(2, Ring(3, 64)),
    "in turn": Spread(3, Ring(2, 32), in_turn=True),
    "one stage": Spread(1, Ring(1, 48), in_turn=True),
    "deep": Spread(1, Ring(34, 16), in_turn=True),
    "paced": Spread(2, Ring(4, 64), in_turn=True, gbps=2),
}


def delivered(spread: Spread, seed: int, protocol: str, both_ways: bool, changes: tuple[Change, ...] = ()) -> None:
    with Emulator(2, 4_000_000, changes) as emulator:
        mail = Mail(emulator, MESSAGES, spread, protocol, both_ways)
        mail.enqueue(3)
        emulator.run(seed)
        assert mail.seen == [3 * len(MESSAGES) if both_ways else 0, 3 * len(MESSAGES)]
        assert all(error.record() is None for error in mail.errors)
