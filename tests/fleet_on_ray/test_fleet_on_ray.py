"""Engines in Ray actors as a fleet: how they enter and leave it, and what becomes of it when processes end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from memsaver_server.fleet import FleetError, Selector, Wanted
from memsaver_server.fleet.ray import RayFleet, RayMembership, RayRecord, placement_group_labels, register
from memsaver_server.fleet.record import RecordContent
from memsaver_server.fleet.sources import membership_of
from tests.waiting import wait_until

from .actors import MODEL, OneEngine, Site


def test_actors_register_in_one_line_and_are_released_and_resumed_together(site: Site) -> None:
    first, second = site.engines("a", "b"), site.engines("c", node=1)
    released = site.fleet.release()
    assert released.success, released.message
    assert {engine.name for engine in released.engines} == {"a", "b", "c"}
    assert all(engine.released_bytes for engine in released.engines)
    assert set(site.states().values()) == {"released"}
    assert not ray.get(first.whole.remote())
    assert site.fleet.resume().success
    assert ray.get([first.whole.remote(), second.whole.remote()]) == [True, True]


def test_one_that_fails_in_the_commit_is_undone_on_all(site: Site) -> None:
    first, second = site.engines("a", "b"), site.engines("c", node=1)
    ray.get(second.fail.remote("c", "release"))
    released = site.fleet.release()
    assert not released.success
    assert released.rolled_back
    assert [engine.name for engine in released.failed] == ["c"]
    assert ray.get([first.whole.remote(), second.whole.remote()]) == [True, True]


def test_a_member_is_told_with_model_gpus_node_and_labels(site: Site) -> None:
    actor = site.engines("a", node=1, labels={"role": "rollout"})
    (member,) = ray.get(actor.members.remote())
    (engine,) = site.status().engines
    assert (engine.name, engine.url, engine.model, engine.host) == ("a", member.url, MODEL, member.host)
    assert engine.gpus
    assert engine.labels == {"rack": "r2", "ray.io/node-id": site.nodes[1], "role": "rollout"}


def test_labels_nodes_and_placement_groups_are_selectors(site: Site) -> None:
    site.engines("a", labels={"role": "rollout"})
    site.engines("b", node=1)
    group = placement_group([{"CPU": 1}])
    try:
        strategy = PlacementGroupSchedulingStrategy(group)
        inside = site.start(OneEngine, 0, 0, site.name, scheduling_strategy=strategy, name="in-the-group", num_cpus=1)
        ray.get(inside.address.remote())
        selectors = {
            "a": Selector(labels={"role": "rollout"}),
            "b": Selector(labels={"rack": "r2", "ray.io/node-id": site.nodes[1]}),
            "in-the-group": Selector(labels=placement_group_labels(group)),
        }
        for name, selector in selectors.items():
            if name == "b":
                selector = selector.model_copy(update={"names": ("b",)})
            assert [engine.name for engine in site.fleet.release(selector).engines] == [name]
    finally:
        remove_placement_group(group)


def test_the_base_class_registers_and_leaves(site: Site) -> None:
    actor = site.start(OneEngine, 0, 0, site.name)
    address = ray.get(actor.address.remote())
    (engine,) = site.status().engines
    assert (engine.url, engine.labels["kind"]) == (address, "base class")
    assert engine.name.startswith("engine-")
    ray.get(actor.leave.remote())
    assert site.status().engines == []


def test_a_name_belongs_to_one_living_actor(site: Site) -> None:
    first, second = site.engines("a"), site.engines("b")
    with pytest.raises(FleetError, match="is called 'a' already"):
        ray.get(second.register_again.remote(site.name, "a"))
    site.kill(first)
    wait_until(lambda: "a" in {engine.name for engine in site.status().engines if engine.error.startswith("its actor")})
    ray.get(second.register_again.remote(site.name, "a"))
    assert all(engine.alive for engine in site.status().engines)


def test_only_actors_register(site: Site) -> None:
    with pytest.raises(FleetError, match="inside of the actor"):
        register("http://127.0.0.1:1", fleet=site.name)


def test_a_service_that_does_not_answer_is_not_registered(site: Site) -> None:
    actor = site.engines("a")
    call = actor.__ray_call__.remote(_register_nothing, site.name)
    with pytest.raises(FleetError, match="does not say its state"):
        ray.get(call)
    assert set(site.states()) == {"a"}


def _register_nothing(_actor: Any, fleet: str) -> None:
    register("http://127.0.0.1:1", fleet=fleet, name="nothing")


def test_a_restarted_actor_is_brought_to_what_is_wanted(site: Site) -> None:
    site.engines("a")
    returning = site.engines("b", node=1, restarts=-1)
    assert site.fleet.release().success
    (before,) = ray.get(returning.members.remote())
    site.kill(returning)
    wait_until(lambda: {engine.url for engine in site.status().engines if engine.alive}.isdisjoint({before.url}))
    wait_until(lambda: site.states() == {"a": "released", "b": "released"})


def test_a_late_actor_is_brought_to_what_is_wanted(site: Site) -> None:
    site.engines("a")
    assert site.fleet.release().success
    site.engines("late", node=1)
    wait_until(lambda: site.states() == {"a": "released", "late": "released"})


def test_an_actor_that_died_for_good_leaves_and_is_told(site: Site) -> None:
    site.engines("a")
    dying = site.engines("b", node=1)
    assert len(site.status().engines) == 2
    site.kill(dying)
    wait_until(lambda: any(engine.error.startswith("its actor died: ") for engine in site.status().engines))
    dead = next(engine for engine in site.status().engines if engine.name == "b")
    assert not dead.alive
    released = site.fleet.release()
    assert released.success
    assert [engine.name for engine in released.engines] == ["a"]
    assert "not in the fleet any more: b (" in released.message


def test_the_death_of_an_actor_is_an_event(site: Site) -> None:
    site.engines("a")
    dying = site.engines("b", node=1)
    pid = ray.get(dying.pid.remote())

    async def deaths() -> list[str]:
        import os
        import signal

        membership = RayMembership(site.name)
        assert len(await membership.members()) == 2
        changed = asyncio.create_task(membership.changed())
        done, _ = await asyncio.wait({changed}, timeout=2)
        assert not done, "nothing has changed"
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(changed, 60)
        assert [member.name for member in await membership.members()] == ["a"]
        return [death.member.name for death in membership.deaths()]

    assert asyncio.run(deaths()) == ["b"]


def test_an_actor_that_is_ended_on_purpose_leaves_without_a_word(site: Site) -> None:
    site.engines("a")
    leaving = site.engines("b", node=1)
    assert len(site.status().engines) == 2
    ray.kill(leaving)
    wait_until(lambda: set(site.states()) == {"a"})


@pytest.mark.parametrize("step", ["check_release", "release"])
def test_a_call_outlives_its_coordinator(site: Site, step: str) -> None:
    first, second = site.engines("a", "b"), site.engines("c", node=1)
    ray.get(second.hold.remote("c", step))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(site.fleet.release)
        wait_until(lambda: ray.get(second.reached.remote("c", step)) == 1)
        site.kill_coordinator()
        ray.get(second.heal.remote())
        released = answer.result()
    assert released.success, released.message
    assert site.states() == {"a": "released", "b": "released", "c": "released"}
    assert site.fleet.resume().success
    assert ray.get([first.whole.remote(), second.whole.remote()]) == [True, True]


def test_a_new_coordinator_knows_what_is_wanted(site: Site) -> None:
    site.engines("a")
    assert site.fleet.release().success
    before = ray.get(site.fleet.actor.where.remote())
    site.kill_coordinator()
    wanted = site.status().wanted
    assert ray.get(site.fleet.actor.where.remote()) != before
    assert [wish.state for wish in wanted] == ["released"]


def test_the_coordinator_is_placed_where_told_and_there_is_one(site: Site) -> None:
    strategy = NodeAffinitySchedulingStrategy(site.nodes[1], soft=False)
    placed = RayFleet(site.name, actor_options={"scheduling_strategy": strategy})
    try:
        assert ray.get(placed.actor.where.remote())[0] == site.nodes[1]
        assert ray.get(site.fleet.actor.where.remote()) == ray.get(placed.actor.where.remote())
    finally:
        placed.stop()


def test_watching(site: Site) -> None:
    site.engines("a")
    events = site.fleet.watch(0.1)
    assert next(events).event == "joined"
    seen = []
    with ThreadPoolExecutor(1) as pool:
        released = pool.submit(site.fleet.release)
        for event in events:
            seen.append(event.event)
            if event.event == "result":
                break
        assert released.result().success
    assert "operation" in seen
    events.close()


def test_errors_are_those_of_a_fleet(site: Site) -> None:
    with pytest.raises(FleetError, match="no engine"):
        site.fleet.release()
    with pytest.raises(FleetError, match="cancelled"):
        site.fleet.cancel("unknown")
    assert site.fleet.progress is None
    assert site.fleet.reconcile() == []


def test_the_record_is_in_the_clusters_own_store(site: Site) -> None:
    wish = Wanted(selector=Selector(names=("a",)), state="released", at=1.0)
    content = RecordContent(wanted=(wish,))

    async def stored() -> tuple[RecordContent, RecordContent]:
        empty = await RayRecord(site.name).load()
        await RayRecord(site.name).save(content)
        return empty, await RayRecord(site.name).load()

    assert asyncio.run(stored()) == (RecordContent(), content)


def test_the_command_line_names_a_fleet_on_ray(site: Site) -> None:
    site.engines("a")
    membership = membership_of(f"ray:{site.name}")
    assert [member.name for member in asyncio.run(membership.members())] == ["a"]
