"""Settings from the environment: what is said of wrong and misspelt ones."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from pydantic import SecretStr

import memsaver_core as ms
from memsaver_core.settings import CoreSettings
from memsaver_server import Settings, attach
from memsaver_server.engine.gate import Gate
from memsaver_server.settings import OTHER_VARIABLES, misspelt_variables, warn_of_misspelt_variables

REFERENCE = Path(__file__).parents[2] / "docs/reference.md"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MEMSAVER_DRAIN_TIMEOUT_S", "soon", "MEMSAVER_DRAIN_TIMEOUT_S is 'soon', but must be a number"),
        ("MEMSAVER_HISTORY", "0", "MEMSAVER_HISTORY is '0', but must be at least 1"),
        ("MEMSAVER_PROTECT_PROBES", "perhaps", "MEMSAVER_PROTECT_PROBES is 'perhaps', but must be 1 or 0"),
        ("MEMSAVER_WHILE_RELEASED", "guess", "MEMSAVER_WHILE_RELEASED is 'guess', but must be 'refuse' or 'queue'"),
        ("MEMSAVER_DRIVER", "metal", "MEMSAVER_DRIVER is 'metal', but must be 'auto', 'cuda' or 'host'"),
        ("MEMSAVER_HOST_CAPACITY", "9EiB", f"MEMSAVER_HOST_CAPACITY is '9EiB', but must be less than {1 << 63}"),
        (
            "MEMSAVER_HOST_CAPACITY",
            "lots",
            "MEMSAVER_HOST_CAPACITY is 'lots', but must be a size, for example 8GiB, 500MB or a number of bytes",
        ),
        ("MEMSAVER_FILE_DIR", "/none", "MEMSAVER_FILE_DIR is '/none', but must be a folder in which files can be made"),
        (
            "MEMSAVER_FILE_DIR",
            "/dev/null",
            "MEMSAVER_FILE_DIR is '/dev/null', but must be a folder in which files can be made",
        ),
    ],
)
def test_a_wrong_variable_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    model = CoreSettings if variable in CoreSettings.variables() else Settings
    with pytest.raises(ms.ConfigurationError) as caught:
        model()
    assert str(caught.value) == said


def test_an_argument_is_told_by_its_own_name() -> None:
    with pytest.raises(ms.ConfigurationError, match=r"^history is '-1', but must be at least 1$"):
        Settings(history=-1)


def test_a_key_is_never_shown() -> None:
    with pytest.raises(ms.ConfigurationError, match="control character") as caught:
        Settings(api_key=SecretStr("hid\x01den"))
    assert "hid" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("MEMSAVER_DRAIN_TIMOUT_S", "MEMSAVER_DRAIN_TIMEOUT_S"),
        ("MEMSAVER_APIKEY", "MEMSAVER_API_KEY"),
        ("memsaver_enable", "MEMSAVER_ENABLED"),
        ("MEMSAVER_HOST_CAPACTY", "MEMSAVER_HOST_CAPACITY"),
        ("MEMSAVER_SG_LANG", "MEMSAVER_SGLANG"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_right_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, meant: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert misspelt_variables()[variable] == meant
    warn_of_misspelt_variables.cache_clear()
    with caplog.at_level(logging.WARNING, "memsaver"), attach(Gate()):
        pass
    assert any(variable in line and meant in line for line in caplog.messages)


@pytest.mark.parametrize(
    "variable",
    [
        *CoreSettings.variables(),
        *Settings.variables(),
        *OTHER_VARIABLES,
        "memsaver_history",
        # Kubernetes sets these in every pod beside the Services of deploy/kubernetes.
        "MEMSAVER_PORT",
        "MEMSAVER_PORT_30000_TCP_ADDR",
        "MEMSAVER_SERVICE_HOST",
        "MEMSAVER_SERVICE_PORT_HTTP",
        "MEMSAVER_CONTROL_SERVICE_HOST",
        "MEMSAVER_CONTROL_PORT",
    ],
)
def test_what_is_read_and_what_others_set_is_not_misspelt(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert variable not in misspelt_variables()


def test_the_reference_lists_the_other_variables() -> None:
    table = REFERENCE.read_text().partition("Other variables:")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(MEMSAVER_\w+)`", table, re.MULTILINE)) == sorted(OTHER_VARIABLES)


@pytest.mark.parametrize("hosts", ["*", "engine, *.example", "http://engine", "engine:30000", "[::1]", "a/b"])
def test_what_is_no_host_name_is_refused(monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    """It would match no request. A pattern for all names would let the page of any site call the service."""
    monkeypatch.setenv("MEMSAVER_HOSTS", hosts)
    with pytest.raises(ms.ConfigurationError, match=r"is not a host name.*MEMSAVER_API_KEY"):
        Settings()


def test_host_names_and_addresses_are_accepted() -> None:
    assert Settings(hosts="Engine, gpu-1.example,10.0.0.7, fd00::1,").hosts.startswith("Engine")
