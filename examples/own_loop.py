"""The instrument around a forward of your own: received attention of a padded batch, no study, no files."""

import torch

import mless

model = mless.load("smollm2", layers=2)
tokenizer = model.tokenizer
tokenizer.pad_token = tokenizer.eos_token
texts = ["Two plus two is four.", "The lighthouse keeper climbed the stairs to light the lamp before the storm."]
batch = tokenizer(texts, return_tensors="pt", padding=True)

with mless.capturing(model.model, layers=[1, 2]) as recorder, torch.inference_mode():
    model.model(**batch, use_cache=False)

for row, text in enumerate(texts):
    sums = recorder.sums[1]
    size = int(batch["attention_mask"][row].sum())
    received = sums.received[row, 0, :, :size].mean(0) / sums.counts[row, 0, :size].clamp(min=1)
    strongest = int(received[1:].argmax()) + 1  # the first token is the attention sink
    print(
        f"{text!r}: after the first token, {tokenizer.decode(batch['input_ids'][row, strongest])!r} receives most in layer 1"
    )
