"""Whether the model computes after a resume what it computed before the release: the tokens of a fixed prompt."""

from __future__ import annotations

from memsaver_core.contract.errors import ConfigurationError, VerificationError, VerificationUnavailableError
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.requests import Release, Resume
from memsaver_core.phases import PhaseLog
from memsaver_server.engine import Engine, Memory, VerifiableEngine
from memsaver_server.engine.admission import Admission
from memsaver_server.engine.tag_selection import released_tags
from memsaver_server.settings import Settings

#: A prompt of tokens that every vocabulary has, and how many are to follow; an engine may have its own.
PROMPT = range(10, 42)
LENGTH = 8


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

    def check(self, request: Release | Resume) -> None:
        """Raise VerificationUnavailableError if ``request`` asks for what is not possible."""
        if request.verify is not None and self._engine is None:
            raise VerificationUnavailableError(f"engine {self._name!r} cannot be verified; leave 'verify' out")
        if request.verify is not None and self._expected is None and request.operation == "resume":
            raise VerificationUnavailableError(
                "there are no tokens to compare with: the release did not ask for them, or the weights were discarded "
                'or updated since. Release with {"verify": "token"}, or set MEMSAVER_VERIFY_TOKENS=1'
            )

    def before_release(self, request: Release, log: PhaseLog) -> None:
        """Compute the expected tokens, if they are wanted and not known. If that fails, so does the release."""
        if self._engine is not None and self._expected is None and self._resident and self._is_asked(request):
            with log.phase(Phase.VERIFY):
                self._expected = self._engine.verify_tokens()

    def after_resume(self, request: Resume, log: PhaseLog, *, resumed: bool) -> None:
        """Compare the tokens if something was ``resumed`` and this is asked for; while memory is released, leave it
        to a later resume. Raise VerificationError if they differ or cannot be computed: admission stays closed."""
        expected = self._expected
        self._due = self._due or (resumed and expected is not None and self._is_asked(request))
        if not self._due or not self._resident or self._engine is None or expected is None:
            return
        got: list[int] = []
        with log.phase(Phase.VERIFY):
            try:
                got = self._engine.verify_tokens()
                found = f"are {got}"
            except Exception as error:
                found = f"could not be computed ({error})"
            if got != expected and expected is self._expected:  # else the weights were updated meanwhile
                failed = (
                    f"the tokens of the verification prompt {found} after the resume; before the release they were "
                    f"{expected}. The memory is resident, and no requests are accepted until a resume passes the check "
                    "or the weights are updated: release and resume again, update the weights, or restart the engine"
                )
                self._admission.unverified(failed)
                raise VerificationError(failed, expected, got)
        self._due = False
        self._admission.unverified("")

    def content_changed(self) -> None:
        """Weights or other content were discarded or written: other tokens are right from now on."""
        self._expected = None
        self._due = False
        self._admission.unverified("")

    def _is_asked(self, request: Release | Resume) -> bool:
        return self._always or request.verify is not None

    @property
    def _resident(self) -> bool:
        status = self._memory.status()
        return not released_tags(status) and not status.hibernated
