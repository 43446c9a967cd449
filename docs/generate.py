"""Writes what the documents take from the code: docs/api.md, and the settings of the service in README.md.

python docs/generate.py           writes them
python docs/generate.py --check   exits with 1 where they are not current
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

# The description of the service is the same on every machine.
os.environ.setdefault("MEMSAVER_DRIVER", "host")

from memsaver_server import Settings, create_app
from memsaver_server.engines.gate import Gate

ROOT = Path(__file__).parents[1]
SETTINGS = re.compile(r"(<!-- settings -->\n).*?(<!-- end of settings -->)", re.DOTALL)


class _Generating(Gate):
    """So that the description has /generate."""

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


def api_reference() -> str:
    """Return docs/api.md."""
    spec = create_app(_Generating(), Settings()).openapi()
    lines = [
        "# API reference",
        "",
        "Made from the service's OpenAPI description (`GET /openapi.json`) by `docs/generate.py`. Sizes are bytes, times seconds.",
        "Fields go in a JSON body or in the query; every one of them is optional unless it says otherwise.",
    ]
    tag = None
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                lines += ["", f"## {tag[0].upper()}{tag[1:]}"]
            lines += _operation(path, method, operation)
    lines += ["", "## Types"]
    for name, schema in sorted(spec["components"]["schemas"].items()):
        if schema.get("type") == "object" and not name.startswith(("HTTPValidation", "Validation")):
            lines += ["", f"### {name}", "", *_paragraph(schema.get("description")), *_fields(schema)]
    return "\n".join(lines) + "\n"


def _operation(path: str, method: str, operation: dict[str, Any]) -> list[str]:
    lines = ["", f"### {method.upper()} {path}", "", *_paragraph(operation.get("description"))]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body and body.get("properties"):
        lines += [*_fields(body), ""]
    elif operation.get("parameters"):
        properties = {one["name"]: one["schema"] for one in operation["parameters"]}
        lines += [*_fields({"properties": properties}), ""]
    lines += ["| status | body | |", "|---|---|---|"]
    for status, answer in sorted(operation["responses"].items()):
        if status == "422" and "Idempotency" not in answer["description"]:
            continue
        schemas = [media.get("schema", {}) for media in answer.get("content", {}).values()]
        types = ", ".join(filter(None, (_type(schema) for schema in schemas)))
        description = answer["description"].replace("Successful Response", "Success.")
        lines.append(f"| {status} | {types} | {description} |")
    return lines


def _paragraph(text: str | None) -> list[str]:
    return [" ".join(text.split()), ""] if text else []


def _fields(schema: dict[str, Any]) -> list[str]:
    required = set(schema.get("required", ()))
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for name, field in schema.get("properties", {}).items():
        default = "" if name in required or "default" not in field else f"`{_json(field['default'])}`"
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
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{_json(schema['const'])}`"
    kind = str(schema.get("type", ""))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), definitions)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'], definitions)}"
    return kind


def _json(value: object) -> str:
    return json.dumps(value)


def settings_table() -> str:
    """Return the table of the service's settings."""
    rows = ["", "| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else f"`{field.default}`"
        rows.append(f"| `MEMSAVER_{name.upper()}` | {default} | {field.description} |")
    return "\n".join([*rows, "", ""])


def documents() -> dict[Path, str]:
    """Return each document that takes something from the code, as it should be."""
    readme = (ROOT / "README.md").read_text()
    return {
        ROOT / "docs/api.md": api_reference(),
        ROOT / "README.md": SETTINGS.sub(lambda match: match[1] + settings_table() + match[2], readme),
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
