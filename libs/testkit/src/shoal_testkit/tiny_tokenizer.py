"""A tiny byte-level tokenizer with a chat template, made anew: what a tokenizer process needs of a model folder.

Its vocabulary is equal in every run, so that answers of scripted engines can be compared between processes. Almost
every id has a text of its own: a lost or repeated token shows in the text.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_TOKENS = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
_WORDS = "wave salt tide reef gull sand foam sail mast keel rope wind rain calm deep blue shoal river stone light"


def write_tiny_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    words = _WORDS.split()
    # Pairs of words give enough different merges to fill the vocabulary.
    tokenizer.train_from_iterator([f"{a}{b} {b}" for a in words for b in words], trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_TOKENS:
        raise RuntimeError(f"the vocabulary has {tokenizer.get_vocab_size()} tokens")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL[2], "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
