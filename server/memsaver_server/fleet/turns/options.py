"""How models take turns: options for each, from the YAML file that lists the members."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from memsaver_core.contract.requests import Fields, Seconds
from memsaver_server.wrong_fields import wrong_fields

#: The name of the entry that holds for all models that have none.
OTHERS = "*"


class ModelOptions(Fields):
    """How one model takes turns. All times in seconds."""

    idle_release_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Release an engine that had no request for so long; by default only to make room."
    )
    awake_s: Seconds = Field(default=5.0, description="An engine stays awake for so long before it makes room.")
    queue_limit: Annotated[int, Field(ge=1)] = Field(
        default=256, description="Requests that wait for the model at most; more are refused with 503."
    )
    wait_s: Seconds = Field(default=300.0, description="A request that has waited so long is refused with 503.")


class TurnOptions:
    def __init__(self, models: Mapping[str, ModelOptions] | None = None) -> None:
        self._models = dict(models or {})

    def of(self, model: str) -> ModelOptions:
        return self._models.get(model) or self._models.get(OTHERS) or ModelOptions()

    @classmethod
    def read(cls, path: str | PathLike[str]) -> TurnOptions:
        """Read them from the mapping ``models`` of a YAML file; a file that is only a list of members has none. Raises
        ValueError if the file cannot be read, or an option does not exist or has a wrong value."""
        import yaml

        try:
            content = yaml.safe_load(Path(path).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"the options of models in {path} cannot be read: {error}") from None
        models = (content.get("models") or {}) if isinstance(content, dict) else {}
        if not isinstance(models, dict):
            raise ValueError(f"'models' in {path} is no mapping; write 'NAME: {{idle_release_s: 300}}' for each")
        return cls({str(name): _options(name, given, path) for name, given in models.items()})


def _options(name: object, given: object, path: object) -> ModelOptions:
    try:
        return ModelOptions.model_validate(given or {})
    except ValidationError as error:
        known = ", ".join(ModelOptions.model_fields)
        raise ValueError(f"model {name!r} in {path}: {wrong_fields(error)}; the options are {known}") from None
