"""Run a set against any OpenAI-compatible server: python run_needles_set.py conversations.parquet BASE_URL MODEL"""

import sys

import datasets
import openai

rows = datasets.load_dataset("parquet", data_files=sys.argv[1], split="train")
client = openai.OpenAI(base_url=sys.argv[2], api_key="none")
right = asked = 0
for row in rows:
    gold = {probe["probe_id"]: probe["gold"] for probe in row["probes"]}
    for ask in row["asks"]:
        turns = row["turns"][: ask["turn_end"]] + ask["tail"]
        begun = turns[-1]["role"] == "assistant"
        reply = client.chat.completions.create(
            model=sys.argv[3],
            messages=[{"role": turn["role"], "content": turn["content"]} for turn in turns],
            max_tokens=32,
            temperature=0,
            extra_body={"continue_final_message": begun, "add_generation_prompt": not begun},
        )
        assert reply.usage.prompt_tokens == ask["prompt_tokens"], "another tokenizer or template than the set's"
        asked += 1
        right += gold[ask["probe_id"]] in (reply.choices[0].message.content or "")
print(f"{right} of {asked} prompts answered with the planted value")
