"""The names under which modules and configurations store their numbers of heads."""

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_attn_heads", "heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
QUERIES_PER_KV_HEAD = ("num_key_value_groups", "n_rep")
# The number of query heads times the head dimension.
WIDTHS = ("split_size", "all_head_size", "inner_dim", "embed_dim", "attn_dim")
