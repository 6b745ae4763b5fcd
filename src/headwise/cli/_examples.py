"""An example of each command, shown by its `--help`."""

EXAMPLES = {
    "report": "headwise report gpt2 --text texts.txt --out report.html",
    "look": 'headwise look gpt2 "The animal was tired." --out look.html',
    "train": 'headwise train --out mini-gpt --prompt "I always work ="',
    "observe": "headwise observe gpt2 --text texts.txt --out table.csv",
    "roles": "headwise roles gpt2 --spans annotated.jsonl --out roles.parquet",
    "heads": "headwise heads gpt2 --examples examples.jsonl --out heads.json",
    "importance": "headwise importance gpt2 --text texts.txt --out scores.parquet",
    "prune": "headwise prune gpt2 --by scores.parquet --remove 0.3 --text texts.txt --out smaller",
    "group": "headwise group Qwen/Qwen3-0.6B --kv-heads 4 --text texts.txt --out grouped",
    "cache": "headwise cache gpt2 --keep 0.5 --window 256 --out plan.json",
    "compare": "headwise compare gpt2 ./fine-tuned --text texts.txt --out compare.html",
    "corpus": "headwise corpus gpt2 --data 'data/*.parquet' --out run --shards 8",
    "merge": "headwise merge run --out table.parquet",
    "count": "headwise count --d-model 768 --heads 12 --layers 12 --tokens 1024",
    "explain": "headwise explain",
}
