"""Ten lines: does layer 1 of the embedded model lose attention to the filler?"""

import mless

model = mless.load("smollm2", layers=1)
questions = mless.items("bundled")
without = mless.prompts(model, questions, "none", prompt="raw")
with_filler = mless.prompts(model, questions, "mless", prompt="raw", length=55)
before = list(mless.received(model, without))
after = list(mless.received(model, with_filler))
for share in mless.retained(before, after):
    print(share)
