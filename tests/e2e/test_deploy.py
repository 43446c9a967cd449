"""The files under deploy/, checked by their validators if installed, and against a running engine."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from memsaver_server.client import Client
from tests.waiting import wait_until

from .serving import Server, memsaver

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"memsaver_[a-z_]+")


def need(tool: str) -> str:
    """Return the path of a tool beside this Python or on the PATH; skip the test if there is none."""
    found = shutil.which(str(Path(sys.executable).with_name(tool))) or shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed")
    return found


def check(*command: str | Path) -> None:
    ran = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/memsaver.json").read_text())
    return loaded


def expressions() -> Iterator[str]:
    """Every query of the dashboard, with its variables filled in."""
    board = dashboard()
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [annotation["expr"] for annotation in board["annotations"]["list"]]
    for query in queries:
        yield query.replace("$__rate_interval", "1m").replace("$instance", ".*")


def test_the_dockerfile() -> None:
    check(need("hadolint"), "Dockerfile")


def test_what_the_dockerfile_copies_is_in_its_context() -> None:
    ignore = (ROOT / ".dockerignore").read_text().split()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists(), name
                assert f"!{name}" in ignore, name


def test_one_image_has_one_name() -> None:
    name = f"memsaver:{version('memsaver')}"
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["engine"]
    assert compose["image"] == container()["image"] == name
    for page in (ROOT / "Dockerfile", DEPLOY / "README.md"):
        built = re.findall(r"docker build.* -t (\S+)", page.read_text())
        assert built
        assert set(built) == {name}, page


def container() -> dict[str, Any]:
    (engine,) = pod()["containers"]
    assert isinstance(engine, dict)
    return engine


def pod() -> dict[str, Any]:
    manifest = yaml.safe_load((DEPLOY / "kubernetes/deployment.yaml").read_text())
    loaded: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return loaded


def test_probes_have_time_outs_that_fit() -> None:
    probes = {kind: container()[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
    for kind, probe in probes.items():
        assert 1 < probe["timeoutSeconds"] <= probe["periodSeconds"], kind
    loading = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    health = re.search(r"--interval=(\d+)s --timeout=(\d+)s --start-period=(\d+)s", (ROOT / "Dockerfile").read_text())
    assert health is not None
    interval, limit, start = map(int, health.groups())
    assert limit < interval
    unit = (DEPLOY / "systemd/memsaver.service").read_text()
    assert f"TimeoutStartSec={loading}\n" in unit
    assert start == loading, "a model that one of them lets load, the others let load"
    hook = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert float(hook[hook.index("--timeout") + 1]) < pod()["terminationGracePeriodSeconds"]
    assert pod()["enableServiceLinks"] is False


def test_it_is_said_how_the_folder_of_the_systemd_unit_comes_about() -> None:
    extras = metadata("memsaver").get_all("Provides-Extra")
    for page in (DEPLOY / "README.md", DEPLOY / "systemd/memsaver.service"):
        text = page.read_text()
        assert "python3 -m venv /opt/memsaver" in text
        (extra,) = set(re.findall(r"/opt/memsaver/bin/pip install -c constraints.txt '\.\[(\w+)\]'", text))
        assert extra in extras
    assert "\nType=notify\n" in (DEPLOY / "systemd/memsaver.service").read_text()


KUBERNETES = [DEPLOY / "kubernetes", DEPLOY / "kubernetes/fleet", DEPLOY / "kubernetes/keeper"]


@pytest.mark.parametrize("folder", KUBERNETES, ids=lambda path: path.name)
def test_kubernetes_manifests(folder: Path) -> None:
    manifests = sorted(path for path in folder.glob("*.yaml") if path.name != "kustomization.yaml")
    named = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted(named) == [path.name for path in manifests]
    for path in manifests:
        check(need("kubernetes-validate"), "--strict", path)


@pytest.mark.parametrize("folder", KUBERNETES, ids=lambda path: path.name)
def test_the_kustomization_builds(folder: Path) -> None:
    check(need("kubectl"), "kustomize", folder)


def fleet_manifests() -> dict[tuple[str, str], Any]:
    """The manifests of the coordinator, by kind and name."""
    folder = DEPLOY / "kubernetes/fleet"
    documents = [each for path in sorted(folder.glob("[!k]*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def test_the_coordinator_finds_the_engines_and_has_no_rights() -> None:
    manifests = fleet_manifests()
    spec = manifests["Deployment", "memsaver-fleet"]["spec"]
    template = spec["template"]["spec"]
    (coordinator,) = template["containers"]
    assert template["automountServiceAccountToken"] is False
    assert {"Role", "RoleBinding", "ClusterRole", "ServiceAccount"}.isdisjoint(kind for kind, _ in manifests)
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate"), "one writes the record"
    assert coordinator["image"] == container()["image"]
    assert "[engine,fleet]" in (ROOT / "Dockerfile").read_text()
    options = dict(option.removeprefix("--").split("=") for option in coordinator["args"])
    kind, name, port = options["members"].split(":")
    members = manifests["Service", name]["spec"]
    engines = yaml.safe_load((DEPLOY / "kubernetes/deployment.yaml").read_text())["spec"]["template"]
    assert (kind, members["clusterIP"], members["publishNotReadyAddresses"]) == ("dns", "None", True)
    assert members["selector"].items() <= engines["metadata"]["labels"].items()
    assert not members["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert int(port) in [each["containerPort"] for each in container()["ports"]]
    assert any(options["record"].startswith(mount["mountPath"]) for mount in coordinator["volumeMounts"])
    (claim,) = [each["persistentVolumeClaim"]["claimName"] for each in template["volumes"] if "emptyDir" not in each]
    assert ("PersistentVolumeClaim", claim) in manifests
    probes = [coordinator[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
    assert all(1 < probe["timeoutSeconds"] <= probe["periodSeconds"] for probe in probes)


def test_the_command_of_the_coordinator_is_one() -> None:
    (coordinator,) = fleet_manifests()["Deployment", "memsaver-fleet"]["spec"]["template"]["spec"]["containers"]
    program, *command = coordinator["command"]
    assert program == "memsaver"
    known = memsaver(*command, "--help", changes={"COLUMNS": "200"}).stdout
    for option in coordinator["args"]:
        assert option.split("=")[0] in known, option


def test_the_network_policy_lets_the_coordinator_reach_dns_and_the_engines_alone() -> None:
    manifests = fleet_manifests()
    policy = manifests["NetworkPolicy", "memsaver-fleet"]["spec"]
    coordinator = manifests["Deployment", "memsaver-fleet"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= coordinator.items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    names, engines = policy["egress"]
    assert {(port["port"], port["protocol"]) for port in names["ports"]} == {(53, "UDP"), (53, "TCP")}
    selected = manifests["Service", "memsaver-members"]["spec"]["selector"]
    assert engines == {"to": [{"podSelector": {"matchLabels": selected}}], "ports": [{"port": 30000}]}


def test_the_keeper_is_the_engines_user_and_its_command_is_one() -> None:
    manifest = yaml.safe_load((DEPLOY / "kubernetes/keeper/daemonset.yaml").read_text())["spec"]["template"]["spec"]
    (keeper,) = manifest["containers"]
    assert manifest["hostNetwork"] is True
    assert manifest["securityContext"]["runAsUser"] == pod()["securityContext"]["runAsUser"]
    assert keeper["image"] == container()["image"]
    unit = (DEPLOY / "systemd/memsaver-keeper@.service").read_text()
    start = re.search(r"^ExecStart=/opt/memsaver/bin/(.*)$", unit, re.MULTILINE)
    assert start is not None
    for command in (keeper["command"], start[1].split()):
        assert command[0] == "memsaver"
        memsaver(*command[1:], "--help")
    assert "\nUser=memsaver\n" in unit, "the dynamic user of memsaver.service has the name of its unit"


@pytest.mark.parametrize("name", ["memsaver.service", "memsaver-keeper@.service"])
def test_the_systemd_unit(tmp_path: Path, name: str) -> None:
    unit = (DEPLOY / "systemd" / name).read_text()
    command = Path(sys.executable).with_name("memsaver")
    if not command.exists():
        pytest.skip("the memsaver command is not installed")
    assert "/opt/memsaver/bin/memsaver" in unit
    (tmp_path / name).write_text(unit.replace("/opt/memsaver/bin/memsaver", str(command)))
    check(need("systemd-analyze"), "verify", "--man=no", tmp_path / name)


def test_compose_mounts_and_builds_what_exists() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert {"engine", "prometheus", "grafana"} == set(services)
    assert (DEPLOY / services["engine"]["build"]["context"] / "Dockerfile").exists()
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service.get("volumes", []):
            assert (DEPLOY / volume.split(":")[0]).exists(), volume
    target = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert target["static_configs"][0]["targets"] == ["engine:30000"]
    gpu = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    assert set(gpu["services"]) <= set(services)


def test_grafana_finds_the_dashboard_and_its_source() -> None:
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/memsaver.yaml").read_text())["providers"][0]
    grafana = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]
    board = dashboard()
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    cells = [
        (panel["gridPos"]["x"] + column, panel["gridPos"]["y"] + row)
        for panel in board["panels"]
        for column in range(panel["gridPos"]["w"])
        for row in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(column for column, _ in cells) < 24


def test_prometheus_takes_the_configuration_the_alerts_and_each_query_of_the_dashboard(tmp_path: Path) -> None:
    promtool = need("promtool")
    check(promtool, "check", "config", DEPLOY / "prometheus/prometheus.yml")
    rules = [{"record": f"dashboard:query{number}", "expr": query} for number, query in enumerate(expressions())]
    path = tmp_path / "dashboard.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    check(promtool, "check", "rules", path)


def test_each_metric_asked_for_is_exported(server: Server, client: Client) -> None:
    client.release()
    client.resume()
    exported = set(METRIC.findall(httpx.get(f"{server.url}/metrics").text))
    asked = {name for query in expressions() for name in METRIC.findall(query)}
    alerts = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    asked |= {name for rule in alerts["groups"][0]["rules"] for name in METRIC.findall(rule["expr"])}
    assert asked <= exported


def test_a_real_prometheus_scrapes_the_engine(server: Server, client: Client, tmp_path: Path) -> None:
    prometheus = need("prometheus")
    configuration = (DEPLOY / "prometheus/prometheus.yml").read_text()
    configuration = configuration.replace("engine:30000", server.url.removeprefix("http://"))
    (tmp_path / "prometheus.yml").write_text(configuration.replace("scrape_interval: 5s", "scrape_interval: 1s"))
    shutil.copy(DEPLOY / "prometheus/alerts.yml", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        prometheus,
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(tmp_path / "log", "w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        client.release()
        query = {"query": 'memsaver_state{state="released"} == 1'}

        def is_scraped() -> bool:
            assert running.poll() is None, (tmp_path / "log").read_text()
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params=query).json()
            except httpx.TransportError:
                return False
            return bool(answer.get("data", {}).get("result"))

        wait_until(is_scraped, interval_s=0.1)
        for expression in expressions():
            asked = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": expression}).json()
            assert asked["status"] == "success", expression
    finally:
        running.terminate()
        running.wait(600)
