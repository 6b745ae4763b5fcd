"""What kernels ask about the processor, as a module so that tests can set it for all of them."""

from headwise._torch_private import cpu_multiplies_bfloat16_tiles

# Whether this CPU multiplies tiles of bfloat16, which makes torch's kernel fast in it.
HAS_AMX = cpu_multiplies_bfloat16_tiles()
