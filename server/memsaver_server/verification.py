"""Whether the model computes after a resume what it computed before the release: the tokens of a fixed prompt."""

from __future__ import annotations

from typing import Any

from memsaver_core import PhaseLog
from memsaver_core.errors import ConfigurationError, MemsaverError
from memsaver_server.admission import Admission
from memsaver_server.engine import Engine, Memory, VerifiableEngine
from memsaver_server.settings import Settings
from memsaver_server.tag_selection import released_tags


class VerificationError(MemsaverError):
    """The tokens ``got`` after a resume are not those ``expected``. Memory is resident, admission closed."""

    kind = "verification_failed"

    def __init__(self, expected: list[int], got: list[int], cause: str = "") -> None:
        self.expected = expected
        self.got = got
        found = f"could not be computed ({cause})" if cause else f"are {got}"
        super().__init__(
            f"the tokens of the verification prompt {found} after the resume; before the release they were {expected}. "
            "The memory is resident, and no requests are accepted until a resume passes the check or the weights are "
            "updated: release and resume again, update the weights, or restart the engine"
        )

    def details(self) -> dict[str, Any]:
        return {"phase": "verify", "expected": self.expected, "got": self.got}


class VerificationUnavailableError(MemsaverError):
    """There is nothing to verify against, or the engine cannot be verified. Nothing was started."""

    kind = "verification_unavailable"
    status = 400


class Verification:
    """Compares the tokens of the engine's verification prompt. Operations call it one at a time."""

    def __init__(self, engine: Engine, admission: Admission, memory: Memory, settings: Settings) -> None:
        """Raises ConfigurationError if every resume shall be verified, but the engine cannot be."""
        self._engine = engine if isinstance(engine, VerifiableEngine) else None
        self._name = engine.name
        self._admission = admission
        self._memory = memory
        self._always = settings.verify_tokens
        self._expected: list[int] | None = None
        self._due = False
        if self._always and self._engine is None:
            raise ConfigurationError(f"MEMSAVER_VERIFY_TOKENS=1 is set, but engine {engine.name!r} cannot be verified")

    def check_release(self, *, asked: bool) -> None:
        """Raise VerificationUnavailableError if a release asks for what is not possible."""
        if asked and self._engine is None:
            raise VerificationUnavailableError(f"engine {self._name!r} cannot be verified; leave 'verify' out")

    def check_resume(self, *, asked: bool) -> None:
        """As ``check_release``, for a resume."""
        self.check_release(asked=asked)
        if asked and self._expected is None:
            raise VerificationUnavailableError(
                "there are no tokens to compare with: the release did not ask for them, or the weights were discarded "
                'or updated since. Release with {"verify": "token"}, or set MEMSAVER_VERIFY_TOKENS=1'
            )

    def before_release(self, log: PhaseLog, *, asked: bool) -> None:
        """Compute the expected tokens, if they are wanted and not known. If that fails, so does the release."""
        if self._engine is not None and self._expected is None and self._resident and (asked or self._always):
            with log.phase("verify"):
                self._expected = self._engine.verify_tokens()

    def after_resume(self, log: PhaseLog, *, asked: bool, resumed: bool) -> None:
        """Compare the tokens if something was ``resumed`` and that is wanted; later, if not all is resident yet.

        Raises:
            VerificationError: they differ, or cannot be computed. Admission stays closed, and the next resume compares
                again.
        """
        expected = self._expected
        self._due = self._due or (resumed and expected is not None and (asked or self._always))
        if not self._due or not self._resident or self._engine is None or expected is None:
            return
        got, cause = [], ""
        with log.phase("verify"):
            try:
                got = self._engine.verify_tokens()
            except Exception as error:
                cause = str(error)
            if got != expected and expected is self._expected:  # else the weights were updated meanwhile
                failed = VerificationError(expected, got, cause)
                self._admission.unverified(str(failed))
                raise failed
        self._due = False
        self._admission.unverified("")

    def content_changed(self) -> None:
        """Weights or other content were discarded or written: other tokens are right from now on."""
        self._expected = None
        self._due = False
        self._admission.unverified("")

    @property
    def _resident(self) -> bool:
        status = self._memory.status()
        return not released_tags(status) and not status.hibernated
