"""Run a set against any OpenAI-compatible server: python run_needles_set.py conversations.parquet BASE_URL MODEL"""

import sys

import datasets
import openai

chat, right = openai.OpenAI(base_url=sys.argv[2], api_key="none").chat.completions, []
for row in datasets.load_dataset("parquet", data_files=sys.argv[1], split="train"):
    gold = {probe["probe_id"]: probe["gold"] for probe in row["probes"]}
    for ask in (ask for ask in row["asks"] if gold[ask["probe_id"]]):  # an abstention has no value to be found
        turns = [{"role": t["role"], "content": t["content"]} for t in row["turns"][: ask["turn_end"]] + ask["tail"]]
        begun = turns[-1]["role"] == "assistant"  # the answer is begun for the model, which goes on
        extra = {"add_generation_prompt": not begun, "continue_final_message": begun}
        reply = chat.create(model=sys.argv[3], messages=turns, max_tokens=32, temperature=0, extra_body=extra)
        right.append(gold[ask["probe_id"]] in (reply.choices[0].message.content or ""))
print(f"{sum(right)} of {len(right)} prompts answered with the planted value")
