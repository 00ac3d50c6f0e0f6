"""Choose the transport that `auto` stands for: by the pattern, the protocol and the bytes of a message.

The choice is made once, when channels are made, by rank 0's table for all ranks: the tables of two ranks could differ.
A table that was measured on this machine (`raymoe doctor --tune` writes it) replaces the built-in one if it is for this
kind of GPU.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from raymoe.cuda import cache
from raymoe.errors import CannotWrite, ConfigError, printable
from raymoe.memory.world import World
from raymoe.transport.spec import PROTOCOLS, ChannelSpec

FILE, FORMAT, MOST_BYTES = "transports.json", 1, 1 << 20
PATTERNS, CANDIDATES = ("pairs", "all_to_all"), ("copy_engine", "tma")
TMA_CAPABILITY = (9, 0)
"""Least compute capability: bulk copies exist from Hopper on."""
MIB = 1 << 20


@dataclass(frozen=True)
class TransportRule:
    """Use `transport` from `from_bytes` on, up to the next rule of the same pattern and protocol."""

    pattern: str
    protocol: str
    from_bytes: int
    transport: str

    def __post_init__(self) -> None:
        for name, known in (("pattern", PATTERNS), ("protocol", PROTOCOLS), ("transport", CANDIDATES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r} in a table of transports; it is one of {known}")
        if type(self.from_bytes) is not int or self.from_bytes < 0:  # it may come from a file
            raise ConfigError(f"from_bytes is {self.from_bytes!r} in a table of transports; it is a number of bytes")


@dataclass(frozen=True)
class Table:
    """The rules for one kind of GPU.

    >>> [BUILT_IN.pick("pairs", "put", nbytes) for nbytes in (0, 96 * MIB - 1, 96 * MIB, 2**40)]
    ['tma', 'tma', 'copy_engine', 'copy_engine']
    """

    gpu: str
    rules: tuple[TransportRule, ...]

    def pick(self, pattern: str, protocol: str, nbytes: int) -> str:
        """Pick the transport for a message.

        A message smaller than all rules takes the rule with the least size. A pattern and protocol without a rule take
        the built-in table.
        """
        rules = [rule for rule in self.rules if (rule.pattern, rule.protocol) == (pattern, protocol)]
        if not rules:
            return BUILT_IN.pick(pattern, protocol, nbytes)
        reached = [rule for rule in rules if rule.from_bytes <= nbytes]
        if not reached:
            return min(rules, key=lambda rule: rule.from_bytes).transport
        return max(reached, key=lambda rule: rule.from_bytes).transport

    def save(self, folder: Path | None = None) -> Path:
        """Write the table atomically, beside the compiled kernels unless a folder is given. Returns the path."""
        path = (folder or cache.cache_folder()) / FILE
        plain = {"format": FORMAT, "gpu": self.gpu, "rules": [vars(rule) for rule in self.rules]}
        try:
            with cache.private_folder(path.parent, create=True) as opened:
                cache.write(opened, FILE, f"{json.dumps(plain, indent=1)}\n".encode())
        except OSError as error:
            raise CannotWrite(
                f"the table of transports cannot be written to {path} ({error.strerror or error}); "
                f"set {cache.CACHE_VARIABLE} to a folder that you own and only you can write"
            ) from error
        return path

    @classmethod
    def load(cls, folder: Path | None = None) -> Table | None:
        """Read the saved table; None if there is none, or if somebody else may have written it (a warning says so).

        A damaged file is an error, which names the file.
        """
        path = (folder or cache.cache_folder()) / FILE
        try:
            with cache.private_folder(path.parent) as opened:
                content = cache.read(opened, FILE, MOST_BYTES)
            if content is None:
                return None
            plain = json.loads(content)
        except FileNotFoundError:
            return None
        except cache.NotPrivateError as error:
            sentence = f"{path} or its folder is not used ({error.strerror}); transport auto takes the built-in table"
            warnings.warn(printable(sentence), RuntimeWarning, stacklevel=2)
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); delete it, or measure again by raymoe doctor --tune"
            ) from error
        try:
            if plain["format"] != FORMAT:
                raise ConfigError(f"its format is {plain['format']}, not {FORMAT}")
            return cls(str(plain["gpu"]), tuple(TransportRule(**rule) for rule in plain["rules"]))
        except (KeyError, TypeError, ConfigError) as error:
            raise ConfigError(
                f"{path} is not a table of transports ({error}); delete it, or measure again by raymoe doctor --tune"
            ) from error


BUILT_IN = Table(
    "NVIDIA H200",
    (
        # The copy engine takes 20 us more between two ranks and 30 to 40 us more among four, for its stream memory
        # operations. The kernel pushes at 0.94 of the engine's rate. It pulls at 0.96 of it between two ranks and at
        # 0.87 among four. The thresholds are the sizes where both take the same time (4x H200, 2026-11-21).
        TransportRule("pairs", "put", 0, "tma"),
        TransportRule("pairs", "put", 96 * MIB, "copy_engine"),
        TransportRule("pairs", "get", 0, "tma"),
        TransportRule("pairs", "get", 64 * MIB, "copy_engine"),
        TransportRule("all_to_all", "put", 0, "tma"),
        TransportRule("all_to_all", "put", 64 * MIB, "copy_engine"),
        TransportRule("all_to_all", "get", 0, "tma"),
        TransportRule("all_to_all", "get", 24 * MIB, "copy_engine"),
    ),
)


def table_from_results(lines: Iterable[Mapping[str, object]], protocol: str, gpu: str) -> Table:
    """Make a table of the fastest transports in result lines of workload p2p, which do not name their protocol.

    >>> def line(transport, nbytes, us):
    ...     return {"op": "copy", "pattern": "pairs", "transport": transport, "bytes": nbytes, "us_p50": us}
    >>> lines = [line("tma", 4096, 3.0), line("copy_engine", 4096, 9.0), line("tma", 2**20, 8.0)]
    >>> lines += [line("copy_engine", 2**20, 7.0), line("tma", 2**21, 15.0), line("copy_engine", 2**21, 11.0)]
    >>> [(rule.from_bytes, rule.transport) for rule in table_from_results(lines, "put", "NVIDIA H100").rules]
    [(4096, 'tma'), (1048576, 'copy_engine')]
    """
    times: dict[tuple[str, int], dict[str, list[float]]] = {}
    for line in lines:
        if line["op"] == "copy" and line["transport"] in CANDIDATES and line["pattern"] in PATTERNS:
            by_transport = times.setdefault((str(line["pattern"]), int(str(line["bytes"]))), {})
            by_transport.setdefault(str(line["transport"]), []).append(float(str(line["us_p50"])))
    rules: list[TransportRule] = []
    for (pattern, nbytes), by_transport in sorted(times.items()):
        best = min(by_transport, key=lambda transport: median(by_transport[transport]))
        if not rules or (rules[-1].pattern, rules[-1].transport) != (pattern, best):
            rules.append(TransportRule(pattern, protocol, nbytes, best))
    return Table(gpu, tuple(rules))


def pattern_of(spec: ChannelSpec) -> str:
    """Return `all_to_all` if any rank sends to, or receives from, several ranks, else `pairs`.

    >>> pattern_of(ChannelSpec(((0, 1), (1, 0)), (8,))), pattern_of(ChannelSpec(((0, 1), (2, 1)), (8,)))
    ('pairs', 'all_to_all')
    """
    ends = [[pair[end] for pair in spec.pairs] for end in (0, 1)]
    return "pairs" if all(len(set(ranks)) == len(ranks) for ranks in ends) else "all_to_all"


@dataclass(frozen=True)
class GpuFacts:
    """The facts about a rank's GPU that transports depend on."""

    name: str
    capability: tuple[int, int]


def why_no_tma(gpus: Sequence[GpuFacts]) -> str | None:
    """Return the reason why these ranks cannot use transport `tma`; None if they can.

    >>> why_no_tma([GpuFacts("NVIDIA H200", (9, 0)), GpuFacts("NVIDIA A100", (8, 0))])
    'NVIDIA A100 of rank 1 has compute capability 8.0, and tma needs 9.0 or more'
    """
    for rank, gpu in enumerate(gpus):
        if gpu.capability < TMA_CAPABILITY:
            has, needs = (".".join(map(str, version)) for version in (gpu.capability, TMA_CAPABILITY))
            return f"{gpu.name} of rank {rank} has compute capability {has}, and tma needs {needs} or more"
    return None


def refuse_impossible_tma(spec: ChannelSpec, gpus: Sequence[GpuFacts]) -> None:
    """Raise if GPU ranks ask for `tma`, by its name or by a number of SMs, and cannot use it."""
    reason = why_no_tma(gpus)
    if reason is not None and spec.transport == "tma":
        raise ConfigError(f"transport tma was asked for; {reason}: take copy_engine, collective or auto")
    if reason is not None and spec.sms is not None:
        raise ConfigError(f"sms is {spec.sms}, which only transport tma takes; {reason}: leave sms out")


def pick_for_auto(spec: ChannelSpec, table: Table, gpus: Sequence[GpuFacts]) -> str:
    """Pick the transport that `auto` stands for between GPUs: never one that a rank cannot use."""
    if spec.sms is not None:
        return "tma"
    picked = table.pick(pattern_of(spec), spec.protocol, spec.nbytes)
    return "copy_engine" if picked == "tma" and why_no_tma(gpus) else picked


def choose_transport(world: World, spec: ChannelSpec) -> str:
    """Choose the transport of these channels, the same on all ranks."""
    if world.device.type == "cpu":
        return "host" if spec.transport == "auto" else spec.transport
    own_facts = GpuFacts(world.gpu.name, world.gpu.capability)
    gpus = [facts for facts in world.swap(own_facts, "channels: gpus") if isinstance(facts, GpuFacts)]
    refuse_impossible_tma(spec, gpus)  # all ranks check the same GPUs, so all raise
    if spec.transport != "auto":
        return spec.transport
    choice: str | None = None
    problem: ConfigError | None = None
    if world.rank == 0:
        try:
            table = Table.load()
            if table is None or table.gpu != world.gpu.name:
                table = BUILT_IN
            choice = pick_for_auto(spec, table, gpus)
        except ConfigError as error:
            problem = error
    world.agree(problem, "channels: table")
    return str(world.swap(choice, "channels: transport")[0])
