"""The recall model's tokenizer: a byte-level BPE of 1024 tokens in which every digit stands alone and no token crosses a line.

    python -m sparsekv.bench.recall_model.tokenizer

writes `tokenizer.json` and the chat template; the same text gives the same file.
"""

from __future__ import annotations

import json
from pathlib import Path

from sparsekv.basis.corpus import bundled
from sparsekv.bench.recall.filler import Filler
from sparsekv.bench.recall.tasks import TASKS, build

FOLDER = Path(__file__).parent / "checkpoint"
VOCABULARY = 1024
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer() -> object:
    """Trains on task contexts and on the calibration text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[ ]?[A-Za-z]+|\n|[ ]+(?=\S)|[ ]?[^\sA-Za-z\d]|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, TURN, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    filler = Filler.bundled("fit")
    contexts = [build(TASKS, 4000, 50, f"tokenizer:{index}", filler, lambda text: len(text) // 3, density=0.7) for index in range(60)]
    questions = [f"{TURN}user\n{q.text}{TURN_END}\n{TURN}assistant\n{q.answer}{TURN_END}\n" for c in contexts for q in c.questions]
    texts = [context.text for context in contexts] + questions + [document.text for document in bundled("fit")]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 65536,
        "eos_token": TURN_END,
        "pad_token": END,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    write_tokenizer()
