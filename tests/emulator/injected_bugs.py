"""Bugs to inject into the kernels, most of them at a statement that orders memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.emulator.build import Change
from tests.emulator.cases import Run
from tests.emulator.ranks import long_pieces, narrow, small


@dataclass(frozen=True)
class InjectedBug:
    """A bug, and the run that finds it."""

    kind: str
    changes: tuple[Change, ...]
    ranks: int = 3
    stamped: bool = False
    routings: tuple[str, ...] = ("uniform", "skewed", "masked", "uniform")
    shape: Any = narrow
    form: str = "whole"
    quantised: bool = False
    tokens: int = 40
    hidden: int | None = None
    group: int = 1
    seed: int = 0
    """The interleaving to try first: where many are right with the bug, one that is not."""

    def run(self) -> Run:
        spec: dict[str, Any] = {"tokens": self.tokens}
        if self.quantised:
            spec |= {"wire": "float8_e4m3", "output": "raw", "hidden": 272}
        if self.group > 1:
            spec |= {"expert_group": self.group, "alignment": 8}
        if self.hidden is not None:
            spec |= {"hidden": self.hidden}
        ll_steps = 10_000_000 if self.quantised else 4_000_000  # a correct run takes less than half
        return Run(
            self.kind,
            self.ranks,
            self.shape,
            self.form,
            spec,
            self.stamped,
            self.routings,
            True,
            self.changes,
            ll_steps,
        )


def _injected(kind: str, file: str, old: str, new: str = "", **fields: Any) -> InjectedBug:
    return InjectedBug(kind, (Change(file, old, new),), **fields)


def _quantising(old: str, new: str = "", **fields: Any) -> InjectedBug:
    return _injected("fused", "quantised_sending.cuh", old, new, quantised=True, **fields)


def _few(file: str, old: str, new: str = "", **fields: Any) -> InjectedBug:
    return _injected("few", file, old, new, **fields)


def _long(old: str) -> InjectedBug:
    return _injected("fused", "local_reduction.cuh", old, shape=long_pieces, tokens=12, hidden=3000)


SYSTEM_FENCE = "ptx::fence_acq_rel_sys();  // orders"
REFILL_FENCE = "ptx::fence_proxy_async_shared();"
SEND_STAGES = "wait_stages_read(stages_ - ahead_);"
INJECTED_BUGS = {
    "rows announced without a wait": _injected("fused", "sending.cuh", "ptx::bulk_wait<YOUNGER>();"),
    "rows announced when they are read": _injected(
        "fused", "sending.cuh", "ptx::bulk_wait<YOUNGER>();", "ptx::bulk_wait_read<YOUNGER>();"
    ),
    "no fence before a sender warp's word": _injected("fused", "sending.cuh", f"{SYSTEM_FENCE} the rows, whose", "//"),
    "no fence before the head words": _injected("fused", "routing.cuh", "ptx::fence_acq_rel_sys();"),
    "the end does not wait for writes": _injected("fused", "ring.cuh", "ptx::bulk_wait<0>();", "settle();"),
    "a stage is loaded too early": _injected("fused", "ring.cuh", SEND_STAGES, "wait_stages_read(stages_);"),
    "no proxy fence before a slot is loaded": _injected(
        "fused", "placing.cuh", "ptx::fence_proxy_async();  // orders the word", "//"
    ),
    # A rank sends rows and gets none, so only the heads and the done words of its peers can hold it back.
    "known routing waits for no word of its peers": InjectedBug(
        "fused",
        (
            Change("dispatch.cu", "may && await_all(p, epoch)", "may && (KNOWN || await_all(p, epoch))"),
            Change("dispatch.cu", "if (!all_run_this_pass(p, epoch)) {", "if (false) {"),
            Change(
                "placement_blocks.cuh",
                "if (!await_heads(p, epoch) || (KNOWN &&",
                "if ((!KNOWN && !await_heads(p, epoch)) || (false &&",
            ),
        ),
        form="known",
        ranks=2,
        seed=16,
        routings=("one",) * 4,
    ),
    "known rows are placed without a wait": _injected(
        "staged", "placement_blocks.cuh", "p.at_once && !await_all(p, epoch)", "!KNOWN && p.at_once", form="known"
    ),
    "known routing keeps the tokens that warps have taken": _injected(
        "fused", "dispatch.cu", "*p.taken = 0;", "if (!KNOWN) *p.taken = 0;", form="known"
    ),
    "known routing leaves a refusal": _injected(
        "fused",
        "dispatch.cu",
        "if constexpr (!KNOWN) {\n                p.summary",
        "if (true) {\n                p.summary",
        form="known",
    ),
    "known routing goes to the ranks of another token": _injected(
        "fused", "sending.cuh", "p_.masks + token_, 0)", "p_.masks + (token_ ^ 1), 0)", form="known"
    ),
    "places of another source": _injected(
        "fused",
        "known_places.cuh",
        "(static_cast<u64>(source) * p.slot_tokens + token) * p.topk;",
        "token * p.topk;",
        form="known",
    ),
    "every expert of a group is aligned": _injected(
        "fused", "places.cuh", "mine += count;", "mine = aligned(mine + count);", ranks=2, group=3
    ),
    "the size of groups is ignored": _injected(
        "staged", "places.cuh", "mine = 0, left = p.group;", "mine = 0, left = 1;", ranks=2, group=2
    ),
    "threads take parts of groups": _injected(
        "ll", "places.cuh", "return least <= p_.group ? p_.group :", "return least <= p_.group ? least :", group=2
    ),
    "a word is not acquired": _injected("fused", "sync.cuh", "load_acquire_sys(word)", "load_relaxed_sys(word)"),
    "one buffer of slots, at the sender": _injected("fused", "sending.cuh", "parity_(epoch & 1)", "parity_(0)"),
    "one buffer of slots": InjectedBug(
        "fused",
        (
            Change("sending.cuh", "parity_(epoch & 1)", "parity_(0)"),
            Change("placing.cuh", "parity_(epoch & 1)", "parity_(0)"),
        ),
        form="pairs",
    ),
    "one buffer of sums": InjectedBug(
        "fused",
        (
            Change("local_reduction.cuh", "p_.slot_at(source, epoch_ & 1, p", "p_.slot_at(source, 0, p"),
            Change("final_reduction.cuh", "p_.slot_at(me, epoch_ & 1, rank, token)", "p_.slot_at(me, 0, rank, token)"),
        ),
        form="pairs",
        routings=("uniform",) * 8,
        ranks=2,
        seed=3,
    ),
    "epochs of the other operation": _injected(
        "fused", "combine.cuh", "before_.load(first, p.operation,", "before_.load(first, p.operation - 8,", form="pairs"
    ),
    "no done word from a sender with nothing to send": _injected(
        "fused",
        "sending.cuh",
        "    announce_done(p, epoch, sender);",
        "    if (n != 0) announce_done(p, epoch, sender);",
        routings=("none", "uniform"),
        ranks=2,
        seed=12,
    ),
    "sums announced when they are read": _injected(
        "fused", "local_reduction.cuh", "ptx::bulk_wait<1>();", "ptx::bulk_wait_read<1>();"
    ),
    "no fence before a sum's word": _injected(
        "fused", "local_reduction.cuh", f"{SYSTEM_FENCE} the pieces, whose", "//"
    ),
    "no fence before a sum leaves its stage": _injected(
        "fused", "local_reduction.cuh", "ptx::fence_proxy_async_shared();  // orders this thread's stores", "//"
    ),
    "no fence before a stamp leaves": _injected(
        "fused", "sending.cuh", "ptx::fence_proxy_async_shared();  // orders the stamp", "//", stamped=True
    ),
    "a sum's stage is overwritten too early": _injected(
        "fused", "local_reduction.cuh", "groups_++ % STEPS_UNDER_WAY", "groups_++ * 0"
    ),
    "sums of three steps announced without a wait": _long("ptx::bulk_wait<3>();"),
    "a step's stage is overwritten too early": _long("ptx::bulk_wait_read<STEPS_UNDER_WAY - 1>();"),
    # Blocks send and place.
    "a mixed block says done by threads that place": _few(
        "sending.cuh", "const u32 thread = threadIdx.x - FIRST_SENDER * 32;", "const u32 thread = threadIdx.x;"
    ),
    "threads that place do not wait for one another": _few("block_barriers.cuh", "ptx::barrier_of_warps(1, THREADS);"),
    "both kinds of warps share a barrier": _few(
        "block_barriers.cuh", "ptx::barrier_of_warps(2,", "ptx::barrier_of_warps(1,"
    ),
    "a vote is taken before all have voted": _few(
        "block_barriers.cuh", "    barrier();\n    for (u32 i = 0; i < SIZE", "    for (u32 i = 0; i < SIZE"
    ),
    "votes are overwritten before they are read": _few(
        "block_barriers.cuh", "barrier();  // all threads have read", "//", form="known"
    ),
    "sender warps use the stages of placement warps": _few(
        "placement_blocks.cuh", "rings_at(p) + p.placement_warps * PlacementWarp::memory(p)", "rings_at(p)"
    ),
    "sender warps end a mixed dispatch too": _few("dispatch.cu", " && !(MIXED && sends)", ""),
    "quantised rows announced without a wait": _quantising("ptx::bulk_wait<YOUNGER>();"),
    "quantised rows announced when they are read": _quantising(
        "ptx::bulk_wait<YOUNGER>();", "ptx::bulk_wait_read<YOUNGER>();"
    ),
    "the last quantised rows announced without a wait": _quantising("ptx::bulk_wait<0>();"),
    "no fence before a quantised row's word": _quantising(f"{SYSTEM_FENCE} the rows, whose", "//"),
    "no fence before a quantised row leaves": _quantising("ptx::fence_proxy_async_shared();"),
    "a stage is given back while it is read": _quantising("wait_stages_read(unread);", shape=small),
    "a warp does not wait for an empty stage": _quantising(
        "leaving_.emptied.await_before(turn);\n        if", "if", shape=small
    ),
    "quantised rows announced before they have arrived": _quantising("leaving_.landed.await(turn);"),
    "a queue entry is reused before its word is stored": InjectedBug(
        "fused",
        (
            Change("quantised_stages.cuh", "announced.await_before(turn);", ""),
            Change(
                "quantised_stages.cuh", "QUEUE = 32;", "QUEUE = 4;"
            ),  # no longer than announcers are sometimes behind
            Change("quantised_stages.cuh", "MOST_STAGES = 12;", "MOST_STAGES = 2;"),
        ),
        quantised=True,
        shape=small,
    ),
    "quantising warps of a mixed block use the stages of placement warps": _few(
        "dispatch.cu", "shared + (MIXED ? mixed_sender_memory(p) : 0)", "shared", quantised=True
    ),
    "a mixed block quantises before its barriers are initialised": _few(
        "quantised_sending.cuh", "sender_barrier();  // the barriers are initialised", "", quantised=True
    ),
    "slots are packed before the peers have read them": _injected(
        "copied", "pack.cu", "!may || !await_heads(p, epoch)", "!may", form="pairs", shape=small, seed=8
    ),
    "a mixed block places before it sends": InjectedBug(
        "few ll",
        (
            Change("dispatch_ll.cu", "sender.run(epoch, tokens);  // before this block waits", ";  //"),
            Change(
                "dispatch_ll.cu",
                "    trace(p.trace, AT_END);",
                "    if (may) {\n        sender.run(epoch, tokens);\n    }",
            ),
        ),
    ),
    "a mixed block sums before it reduces": InjectedBug(
        "few ll",
        (
            Change("combine_ll.cu", "local_reduction.run(epoch);", ";"),
            Change("combine_ll.cu", "    trace(p.trace, AT_END);", "    local_reduction.run(epoch);"),
        ),
    ),
    "lines of the epoch before": _injected("ll", "lines.cuh", "high == epoch ?", "high + 2 >= epoch ?"),
    "the count of pieces that the final reduction took is not reset": _injected(
        "fused", "combine.cu", "p.taken[0] = p.taken[1] =", "p.taken[0] ="
    ),
    "the warps of a combine leave items out": _injected("fused", "items.cuh", "KNOWN * warps_)", "3 * warps_)"),
    "a counting block's runs are not counted": _injected(
        "ll", "routing_ll.cuh", "                count_run();\n", quantised=True, shape=small
    ),
    "entries before a counting block's own are not counted": _injected(
        "ll", "routing_ll.cuh", ": counts_[expert] + before;", ": before;"
    ),
    "no __syncwarp after another thread of the warp acquired a word": _injected(
        "fused", "placing.cuh", "__syncwarp();  // hands what a thread has acquired", "//"
    ),
    "a shuffle instead of __syncwarp hands a row over": _injected(
        "fused", "placing.cuh", "__syncwarp();  // hands the row, which one", "//", quantised=True, shape=small
    ),
    "a shuffle instead of __syncwarp hands a stamp over": _injected(
        "fused", "placing.cuh", "__syncwarp();  // hands the row, which one", "//", stamped=True
    ),
    "a vote instead of __syncwarp hands pieces over": _injected(
        "fused", "final_reduction.cuh", "__syncwarp();  // hands what was acquired", "//"
    ),
    "no fence before a stage is filled again": _injected(
        "fused",
        "placing.cuh",
        f"{REFILL_FENCE}\n            __syncwarp();",
        "__syncwarp();",
        quantised=True,
        shape=small,
    ),
    "no fence before a stamp's stage is filled again": _injected(
        "fused", "placing.cuh", f"{REFILL_FENCE}\n            __syncwarp();", "__syncwarp();", stamped=True
    ),
    "no barrier before a block's word": _injected(
        "staged", "sending.cuh", "sender_barrier();  // hands what the warps", "//", shape=small
    ),
    "no fence before a block's word": _injected(
        "staged", "sending.cuh", "ptx::fence_acq_rel_sys();  // orders the rows before", "//", shape=small
    ),
    "one buffer of lines": InjectedBug(
        "ll",
        (Change("rows_ll.cuh", "p.rows[epoch & 1]", "p.rows[0]"),),
        routings=("uniform",) * 6,
        form="pairs",
        tokens=6,  # one seed in seven finds it; with 40 tokens more than nine seeds of 7 s each did not
    ),
}

NEEDED_BY_ONE = Change("places.cuh", "p.scratch->needed = where", "if (threadIdx.x == 0) p.scratch->needed = where")
"""No bug. Without it all threads of a block store the same number, and one of these stores soon becomes visible."""

TWINS = {
    "rows announced when they are read": "rows announced without a wait",
    "one buffer of slots, at the sender": "one buffer of slots",
    "sums announced when they are read": "sums of three steps announced without a wait",
    "a step's stage is overwritten too early": "a sum's stage is overwritten too early",
    "no fence before a stamp leaves": "no fence before a sum leaves its stage",
    "quantised rows announced when they are read": "quantised rows announced without a wait",
    "the last quantised rows announced without a wait": "quantised rows announced without a wait",
    "a shuffle instead of __syncwarp hands a stamp over": "a shuffle instead of __syncwarp hands a row over",
    "a vote instead of __syncwarp hands pieces over": "no __syncwarp after another thread of the warp acquired a word",
    "no fence before a stamp's stage is filled again": "no fence before a stage is filled again",
}
"""Bugs that break a rule in the same way as another one, in another place or shape. `make test` runs the other one."""

REFUSING = {
    "fused, a last-out ticket that orders nothing": (
        NEEDED_BY_ONE,
        Change(
            "sync.cuh",
            "ptx::atomic_increment_wrapping(&operation->ticket, last) == last",
            "ptx::atomic_add_32(&operation->ticket, 1) % (last + 1) == last",
        ),
    ),
    "ll, a ticket of trouble that orders nothing": (
        NEEDED_BY_ONE,
        Change("sync.cuh", "any || hands_over ? ptx::atomic_add_acq_rel", "false ? ptx::atomic_add_acq_rel"),
    ),
}
"""Bugs that show in a refused step; a name begins with the kind of backend."""

COPYING = {
    "signalled when the bytes are read": Change("ring.cuh", "ptx::bulk_wait<0>();", "settle();"),
    "a transfer announced before its stores have arrived": Change("copy.cu", "ptx::bulk_wait<ANNOUNCE_AFTER>();", ""),
    "a credit that is not waited for": Change(
        "transfers.cuh", "credit + transfer.lag >= epoch", "credit + transfer.lag + 1 >= epoch"
    ),
    "no proxy fence after a credit": Change("copy.cu", "        ptx::fence_proxy_async();", ""),
    "threads that do not wait for one another before the ticket": Change(
        "copy.cu", "ptx::barrier_of_warps(1, ORDINARY_THREADS);  // orders the stores", "//"
    ),
    "a byte too many": Change("unaligned.cuh", "thread < span.bytes - tail", "thread <= span.bytes - tail"),
}

BY_ERROR = {
    "stores 4 bytes of .*outside every region": Change(
        "places.cuh", "p.out_weights + place * 4ull, static", "p.out_weights + (place + (1ull << 42)) * 4ull, static"
    ),
    "bulk stores 144 bytes of dispatch_rows of rank .*not aligned to 16": Change(
        "sending.cuh", "row >> 32), stage", "row >> 32) + 8, stage"
    ),
    "stores 4 bytes of .*after the end of masks.*outside every region": Change(
        "routing.cuh",
        "p_.masks[token] = p_.ranks_of(token);",
        "p_.masks[token] = p_.ranks_of(token), p_.masks[token + 40] = 0;",
    ),
    "stores 8 bytes of .*after the end of own of rank .*outside every region": Change(
        "beginning.cuh", "scratch.needed = 0;", "(&scratch)[12].needed = 0;"
    ),
    "a plain access to": Change("placing.cuh", "queue_[loads_++ % QUEUE] =", "queue_[loads_++ % QUEUE + 65536] ="),
    "loads 4 bytes of shared memory at .*, which thread .* has stored, and nothing orders the two": Change(
        "places.cuh", "        block_barrier();\n        const u32 each", "        const u32 each"
    ),
    "bulk loads into .* of shared memory at .*, which thread .* has loaded, and no proxy fence": Change(
        "placing.cuh", f"{REFILL_FENCE}\n            __syncwarp();", "__syncwarp();"
    ),
    "loads 8 bytes of shared memory at .*, which a bulk load fills, and the thread has not found": Change(
        "placing.cuh", "__syncwarp();  // hands the row, which one", "//"
    ),
    "no thread can continue: .*waits for the bytes of the barrier at": Change(
        "ring.cuh", "ptx::barrier_expect(barrier, chunk.bytes);", "ptx::barrier_expect(barrier, chunk.bytes + 16);"
    ),
    "two different collectives": Change(
        "local_reduction.cuh",
        "            __syncwarp();\n            sum_step(",
        "            if (!leads_) __syncwarp();\n            sum_step(",
    ),
    "still read its shared memory": Change("ring.cuh", "void drain() { ptx::bulk_wait<0>(); }", "void drain() {}"),
}
"""Bugs by the error that the machine must report."""
