"""Engines on a Ray cluster give all their memory to a trainer and get it back, while engines and coordinator fail.

    pip install 'memsaver[engine,ray]'
    python examples/fleet_on_ray.py                50 rounds, a fault in every other one
    python examples/fleet_on_ray.py --rounds 8     fewer

Eight engines run as Ray actors on four simulated nodes, two on the device of each node. The trainer needs all memory
of the four devices, so it can run only if every engine has given everything back. Without a GPU the devices are host
memory. A round releases the fleet, trains, resumes the fleet and compares the tokens of every engine. The faults: a
commit fails, the coordinator is killed, an engine is stopped or killed. The exit code is 0 if no operation was half
done, all tokens were equal and the trainer always had its memory.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memsaver_server.client import Client
from memsaver_server.fleet import FleetResult
from memsaver_server.fleet.ray import EngineActor, RayFleet

MIB = 1 << 20
NODES = 4
ENGINES = 8
#: Memory of a node's device, and what the trainer leaves of it.
DEVICE_BYTES = 144 * MIB
SPARE_BYTES = 2 * MIB
#: Faults in the order in which they come. Those that cost many seconds come less often.
FAULTS = ("commit fails", "coordinator killed", "engine stopped", "commit fails", "coordinator killed", "engine killed")
#: A stopped engine counts as hung after this time; a killed one is back within the longer one. Seconds.
SILENCE_S = 3.0
BACK_S = 120.0


@ray.remote(num_cpus=0, max_restarts=-1)
class Engine(EngineActor):
    """The reference engine with a small model; one call of its memory can be made to fail."""

    def start(self) -> Any:
        from memsaver_server.engine import LOCAL_MEMORY
        from memsaver_server.reference.engine import TransformersEngine

        class Memory:
            fails = ""

            def __getattr__(self, call: str) -> Any:
                if call == self.fails:
                    self.fails = ""
                    raise RuntimeError("the fault of this round")
                return getattr(LOCAL_MEMORY, call)

        engine = TransformersEngine(kv_cache_bytes=8 * MIB, max_len=64, batch_sizes=(1,))
        engine.memory = self.memory = Memory()  # type: ignore[attr-defined]
        return engine

    def fail_next(self, call: str) -> None:
        self.memory.fails = call

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
class Trainer:
    """Holds all memory of every device while it trains, and none between."""

    def __init__(self) -> None:
        import torch

        import memsaver_core as ms

        self.states = []
        for device in range(NODES):
            with ms.region("trainer", restore="discard", device=device):
                self.states.append(torch.empty(DEVICE_BYTES - SPARE_BYTES, dtype=torch.uint8))
        ms.release()

    def train(self) -> int:
        """Take the memory, use it, give it back; return its bytes. Raises if a device lacks it."""
        import memsaver_core as ms

        taken = ms.resume().resumed_bytes
        for state in self.states:
            state[::4096] = 1
        ms.release()
        return taken


class Place:
    """The cluster, and what runs on it."""

    def __init__(self, cluster: Cluster) -> None:
        self.key = secrets.token_hex(16)
        self._nodes = [cluster.add_node(num_cpus=1).node_id for _ in range(NODES)]
        devices = [f"fleet-{os.getpid()}-{number}" for number in range(NODES)]
        # The trainer first, as it needs all memory to begin with.
        self.trainer = Trainer.options(**self._on(0, ",".join(devices))).remote()
        ray.get(self.trainer.__ray_ready__.remote())
        self.engines = {
            f"engine-{number}": Engine.options(
                name=f"engine-{number}", **self._on(number % NODES, devices[number % NODES])
            ).remote()
            for number in range(ENGINES)
        }
        here = {"runtime_env": {"env_vars": {"MEMSAVER_API_KEY": self.key}}}
        self.fleet = RayFleet(actor_options=here, silence_s=SILENCE_S, lease_s=2 * SILENCE_S)

    def _on(self, number: int, device: str) -> dict[str, Any]:
        variables = {
            "MEMSAVER_API_KEY": self.key,
            "MEMSAVER_HOST_DEVICE": device,
            "MEMSAVER_HOST_CAPACITY": str(DEVICE_BYTES),
            "OMP_NUM_THREADS": "1",
        }
        strategy = NodeAffinitySchedulingStrategy(self._nodes[number], soft=False)
        return {"scheduling_strategy": strategy, "runtime_env": {"env_vars": variables}}

    def tokens(self) -> dict[str, list[int]]:
        """Return what each engine answers to the same prompt."""

        def one(engine: Any) -> list[int]:
            with Client(ray.get(engine.address.remote()), api_key=self.key) as client:
                answer = client.generate(input_ids=[7, 11, 13], max_new_tokens=8, temperature=0.0, ignore_eos=True)
                return list(answer["output_ids"])

        with ThreadPoolExecutor(ENGINES) as pool:
            return dict(zip(self.engines, pool.map(one, self.engines.values()), strict=True))


class Fault:
    """What goes wrong during one call of the fleet."""

    def __init__(self, kind: str, place: Place, luck: random.Random) -> None:
        self.kind = kind
        self._is_due = True
        self.engine = luck.choice(sorted(place.engines))
        self._place = place
        self._after_s = luck.uniform(0.0, 0.2)

    def during(self, verb: str) -> FleetResult:
        """Call the fleet; return its answer. The first call is disturbed, a repeat is not."""
        kind, self._is_due = (self.kind if self._is_due else "none"), False
        actor = self._place.engines[self.engine]
        call: Callable[[], FleetResult] = getattr(self._place.fleet, verb)
        if kind == "commit fails":
            ray.get(actor.fail_next.remote(verb))
        elif kind == "coordinator killed":
            return self._hit(call, ray.get(self._place.fleet.actor.where.remote())[1], signal.SIGKILL)
        elif kind == "engine killed":
            return self._hit(call, ray.get(actor.pid.remote()), signal.SIGKILL)
        elif kind == "engine stopped":
            pid = ray.get(actor.pid.remote())
            try:
                return self._hit(call, pid, signal.SIGSTOP)
            finally:
                os.kill(pid, signal.SIGCONT)
        return call()

    def _hit(self, call: Callable[[], FleetResult], pid: int, number: signal.Signals) -> FleetResult:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(call)
            time.sleep(self._after_s)
            os.kill(pid, number)
            return answer.result()


class Check:
    """Calls the fleet until it has done what was asked, and compares each answer with what the engines say."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.wrong: list[str] = []
        self.failures: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {"release": [], "train": [], "resume": []}

    def call(self, verb: str, fault: Fault) -> None:
        before, after = ("resident", "released") if verb == "release" else ("released", "resident")
        deadline = time.monotonic() + BACK_S
        while True:
            began = time.monotonic()
            result = fault.during(verb)
            self.seconds[verb].append(time.monotonic() - began)
            states = {engine.name: engine.state for engine in self._place.fleet.status().engines}
            if result.success:
                if len(states) != ENGINES or set(states.values()) != {after}:
                    self.wrong.append(f"{verb} says that it succeeded, but the engines are {states}")
                return
            self.failures.update(engine.kind for engine in result.failed)
            # Every engine is as before, or the answer names it. One that was killed may be loading, or be loaded.
            killed = {fault.engine} if fault.kind == "engine killed" else set()
            silent = [name for name in states.keys() - killed if states[name] != before and name not in result.message]
            if silent or not result.failed:
                self.wrong.append(f"{verb} failed: {result.message}; but the engines are {states}")
            if time.monotonic() > deadline:
                raise TimeoutError(result.message)
            time.sleep(0.5)

    def train(self) -> None:
        began = time.monotonic()
        try:
            ray.get(self._place.trainer.train.remote())
        except RayTaskError as error:
            self.wrong.append(f"the trainer had not its memory: {error.cause}")
        self.seconds["train"].append(time.monotonic() - began)

    def tokens(self, expected: dict[str, list[int]]) -> None:
        found = self._place.tokens()
        self.wrong += [f"{name} answers {found[name]}, not {expected[name]}" for name in found if found != expected]


def run(place: Place, rounds: int, seed: int) -> tuple[Check, Counter[str]]:
    luck = random.Random(seed)
    check, kinds = Check(place), Counter[str]()
    expected = place.tokens()
    for number in range(rounds):
        kind = FAULTS[number // 2 % len(FAULTS)] if number % 2 else "none"
        hit = luck.choice(("release", "resume"))
        kinds[kind] += 1
        known, began = len(check.wrong), time.monotonic()
        check.call("release", Fault(kind if hit == "release" else "none", place, luck))
        check.train()
        check.call("resume", Fault(kind if hit == "resume" else "none", place, luck))
        check.tokens(expected)
        about = f"{kind} in {hit}" if kind != "none" else "no fault"
        print(f"round {number + 1:3}: {about:29} {time.monotonic() - began:5.1f} s", *check.wrong[known:], flush=True)
    return check, kinds


def report(check: Check, kinds: Counter[str], whole_s: float) -> None:
    print(f"\n{sum(kinds.values())} rounds with {ENGINES} engines on {NODES} nodes in {whole_s:.0f} s")
    for kind, count in kinds.items():
        print(f"  {kind:20} {count:4} rounds")
    for verb, seconds in check.seconds.items():
        print(f"  {verb:20} {len(seconds):4} calls, median {median(seconds):.2f} s, slowest {max(seconds):.2f} s")
    for kind, count in check.failures.items():
        print(f"  failure reported: {kind:20} {count:4} times")
    print(f"  half done, tokens unequal, or trainer without memory: {len(check.wrong)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, choices=range(1, 10_000), metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of what the faults hit, and when")
    options = parser.parse_args()
    began = time.monotonic()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        place = Place(cluster)
        place.tokens()
        print(f"{ENGINES} engines are ready after {time.monotonic() - began:.0f} s", flush=True)
        check, kinds = run(place, options.rounds, options.seed)
    finally:
        ray.shutdown()
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node, allow_graceful=False)
        cluster.shutdown()
    report(check, kinds, time.monotonic() - began)
    sys.exit(1 if check.wrong else 0)


if __name__ == "__main__":
    main()
