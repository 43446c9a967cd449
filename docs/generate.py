"""Write what the pages take from the code: docs/api.md, the tables of options and settings in docs/reference.md, the
states of operations in docs/architecture.md.

python docs/generate.py           writes them
python docs/generate.py --check   exits with 1 if they are not current
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

# The description must not depend on the machine.
os.environ.setdefault("MEMSAVER_DRIVER", "host")

from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from memsaver_core.contract.requests import Acts, FleetRelease, FleetResume, Release, Resume, acts_of
from memsaver_core.settings import CoreSettings
from memsaver_server import Settings, create_app
from memsaver_server.engine import CachePages
from memsaver_server.engine.gate import Gate
from memsaver_server.fleet.operation import FLEET
from memsaver_server.operation.table import ENGINE, Row, Table

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs/reference.md"
ARCHITECTURE = ROOT / "docs/architecture.md"
#: What the fields of ``Acts.by`` are about.
ACTS = {"core": "the memory", "service": "how the operation runs", "caller": "only this call"}


class _Everything(Gate):
    """Has every optional capability, so that the description has every route. No method is called."""

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def kv_cache(self) -> CachePages:
        raise NotImplementedError

    def limit_kv_cache(self, *_arguments: Any, **_options: Any) -> None:
        raise NotImplementedError

    def resize_kv_cache(self, pages: int) -> CachePages:
        raise NotImplementedError

    def update_weights_from_disk(self, *_arguments: Any, **_options: Any) -> int:
        raise NotImplementedError

    def update_weights_from_tensor(self, *_arguments: Any, **_options: Any) -> int:
        raise NotImplementedError


def api_reference() -> str:
    """Return docs/api.md."""
    spec = create_app(_Everything(), Settings()).openapi()
    lines = [
        "# API reference",
        "",
        "Generated from the service's OpenAPI description (`GET /openapi.json`) by `docs/generate.py`.",
        "Sizes are in bytes, times in seconds.",
        "Fields go in a JSON body or in the query string, and are optional unless stated otherwise.",
    ]
    sections: dict[str, list[tuple[str, dict[str, Any]]]] = {"memory occupation": []}  # the first section
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            sections.setdefault(operation["tags"][0], []).append((f"{method.upper()} {path}", operation))
    bodies: dict[str, list[str]] = {}
    for tag, operations in sections.items():
        lines += ["", f"## {tag[0].upper()}{tag[1:]}"]
        for name, operation in operations:
            lines += _operation(name, operation, bodies)
    lines += [
        "",
        "## Errors",
        "",
        "Every error has the body [ErrorAnswer](#erroranswer); `error.type` names it in one word.",
        "",
    ]
    lines += ["| status | meaning |", "|---|---|", *_errors(spec)]
    lines += ["", "## Types"]
    for name, schema in sorted(spec["components"]["schemas"].items()):
        if schema.get("type") == "object" and not name.startswith(("HTTPValidation", "Validation")):
            lines += ["", f"### {name}", "", *_paragraph(schema.get("description")), *_fields(schema)]
    return "\n".join(lines) + "\n"


def _operation(name: str, operation: dict[str, Any], bodies: dict[str, list[str]]) -> list[str]:
    """Return what the page says of an operation; ``bodies`` has the rows of those before, and gets this one's."""
    lines = ["", f"### {name}", "", *_paragraph(operation.get("description"))]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body and body.get("properties"):
        lines += [*_body(name, _fields(body), bodies), ""]
    elif named := [f"`{one['name']}`" for one in operation.get("parameters", ()) if one["in"] == "query"]:
        lines += [f"Query parameters: {', '.join(named)}.", ""]
    answers, errors = [], []
    for status, answer in sorted(operation["responses"].items()):
        types = _types(answer)
        if "ErrorAnswer" in types:
            errors.append(status)
        elif "HTTPValidationError" not in types:
            about = "" if answer["description"] == "Successful Response" else f" {answer['description']}"
            answers.append(f"- **{status}** {types}{about}".rstrip())
    lines += answers
    if errors:
        lines.append(f"- [errors](#errors) {', '.join(errors)}")
    return lines


def _body(name: str, table: list[str], bodies: dict[str, list[str]]) -> list[str]:
    """Return the table of a body, or how it differs from the one of an operation before, if by little."""
    head, rows = table[:2], table[2:]
    for before, theirs in bodies.items():
        lacking, more = ([row for row in a if row not in b] for a, b in ((theirs, rows), (rows, theirs)))
        if len(lacking) + len(more) < len(theirs) / 2:
            anchor = before.lower().replace(" ", "-").replace("/", "")
            gone, new = ([row.split("|")[1].strip() for row in each] for each in (lacking, more))
            but = ", ".join(name for name in gone if name not in new)
            same = f"The fields of [{before}](#{anchor})" + (f" without {but}" if but else "")
            return [f"{same}; these differ or are added:", "", *head, *more] if more else [f"{same}."]
    bodies[name] = rows
    return table


def _errors(spec: dict[str, Any]) -> list[str]:
    found = {
        f"| {status} | {answer['description']} |"
        for methods in spec["paths"].values()
        for operation in methods.values()
        for status, answer in operation["responses"].items()
        if "ErrorAnswer" in _types(answer)
    }
    return sorted(found)


def _types(answer: dict[str, Any]) -> str:
    schemas = [media.get("schema", {}) for media in answer.get("content", {}).values()]
    return ", ".join(filter(None, (_type(schema) for schema in schemas)))


def _paragraph(text: str | None) -> list[str]:
    return [" ".join(text.split()), ""] if text else []


def _fields(schema: dict[str, Any]) -> list[str]:
    required = set(schema.get("required", ()))
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in schema.get("properties", {}).items():
        default = "" if name in required or "default" not in field else f"`{json.dumps(field['default'])}`"
        about = " ".join(str(field.get("description", "")).split())
        lines.append(f"| `{name}` | {_type(field, schema.get('$defs', {}))} | {default} | {about} |")
    return lines


def _type(schema: dict[str, Any], definitions: dict[str, Any] | None = None) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return _type(definitions[name]) if definitions and name in definitions else f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one, definitions) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kind = str(schema.get("type", ""))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), definitions)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'], definitions)}"
    return kind


def options_table() -> str:
    """Return the table of what may be asked of a release and of a resume; first of an engine, then of a fleet only."""
    calls: dict[str, list[str]] = {}
    for alone in (False, True):
        for base, model in ((Release, FleetRelease), (Resume, FleetResume)):
            schema = model.model_json_schema()
            for name, acts in acts_of(model).items():
                if (name not in base.model_fields) is alone:
                    field = model.model_fields[name].alias or name
                    row = _option(field, schema["properties"][field], schema["$defs"], acts, alone)
                    calls.setdefault(row, []).append(base.operation)
    rows = [f"| {row.format(' and '.join(of))} |" for row, of in calls.items()]
    head = ["| field | operation | type | default | meaning | affects | in a fleet |", "|---|---|---|---|---|---|---|"]
    return "\n".join(["", *head, *rows, "", ""])


def _option(name: str, field: dict[str, Any], definitions: dict[str, Any], acts: Acts, alone: bool) -> str:
    kind = _type(field, definitions).replace(" or null", "")
    default = field.get("default") or None
    to_engines = "sent to each engine" + ("; also to those that join later" if acts.lasting else "")
    own = "only in a fleet" if alone else "the coordinator acts on it"
    fleet = {"each": to_engines, "own": own}.get(acts.fleet, f"refused: {acts.fleet}")
    shown = "" if default is None else f"`{json.dumps(default)}`"
    return f"`{name}` | {{}} | {kind} | {shown} | {field['description']} | {ACTS[acts.by]} | {fleet}"


def settings_table() -> str:
    """Return the tables of all settings."""
    core = _settings(CoreSettings)
    service = _settings(Settings)
    head = "Core settings, for every process that uses regions:"
    return "\n".join(["", head, "", *core, "", "Service settings:", "", *service, "", ""])


def _settings(model: type[BaseSettings]) -> list[str]:
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        default = f"`{_plain(field.default)}`" if field.default not in (None, "", PydanticUndefined) else ""
        rows.append(f"| `MEMSAVER_{name.upper()}` | {default} | {str(field.description).rstrip('.')} |")
    return rows


def _plain(value: object) -> str:
    return json.dumps(value) if isinstance(value, (bool, int, float)) else str(value)


def operation_states(table: Table) -> str:
    """Return the table of what moves an operation from one state to the next, and which of them callers see."""
    shown = ", ".join(f"`{state}`" for state, status in table.statuses.items() if state != status == "running")
    lines = ["", f"Callers see {shown} as `running`.", ""]
    lines += ["| state | event | by | to | when |", "|---|---|---|---|---|"]
    lines += [
        f"| {', '.join(row.states.split())} | `{row.event}` | {row.by} | {_target(row)} | {row.when} |"
        for row in table.rows
    ]
    return "\n".join([*lines, "", ""])


def state_diagram(table: Table) -> str:
    """Return a picture of an operation's states."""
    lines = ["", "```mermaid", "stateDiagram-v2", f"    [*] --> {table.first}"]
    lines += [
        f"    {state} --> {row.to}: {row.event}"
        for row in table.rows
        if isinstance(row.to, str)
        for state in row.states.split()
        if state != row.to
    ]
    left = {state for row in table.rows if isinstance(row.to, str) for state in row.states.split() if state != row.to}
    lines += [f"    {state} --> [*]" for state in table.statuses if state not in left]
    return "\n".join([*lines, "```", ""])


def _target(row: Row) -> str:
    if row.to is None:
        return "stays"
    return row.to if isinstance(row.to, str) else f"{row.to.status}, `{row.to.kind}`"


def _with_part(page: str, name: str, text: str) -> str:
    """Return a page with ``text`` between ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""
    part = re.compile(f"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    return part.sub(lambda match: f"{match[1]}{text}{match[2]}", page)


def documents() -> dict[Path, str]:
    """Return the current text of each page that takes something from the code."""
    reference = _with_part(REFERENCE.read_text(), "options", options_table())
    architecture = ARCHITECTURE.read_text()
    for whose, table in {"an engine": ENGINE, "a fleet": FLEET}.items():
        picture = state_diagram(table) if table is ENGINE else ""
        architecture = _with_part(architecture, f"states of an operation of {whose}", picture + operation_states(table))
    return {
        ROOT / "docs/api.md": api_reference(),
        ARCHITECTURE: architecture,
        REFERENCE: _with_part(reference, "settings", settings_table()),
    }


def main() -> int:
    stale = [path for path, text in documents().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current: python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(documents()[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
