"""The smallest complete use: every device has one row of 7168 values, every device gets their sum."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_twoshot

jax.config.update("jax_num_cpu_devices", 8)  # before JAX is first used; only counts where there is no GPU
mesh = jax.make_mesh((jax.device_count(),), ("tp",))
rows = jax.random.normal(jax.random.key(0), (mesh.size, 7168), "bfloat16")


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P())
def step(row: jax.Array) -> jax.Array:
    return jax_twoshot.all_reduce(row, "tp")


with jax_twoshot.Workspace(mesh, "tp", rows=1, width=7168):  # optional on CPU
    total = step(jax.device_put(rows, NamedSharding(mesh, P("tp"))))
copies = {np.asarray(shard.data).tobytes() for shard in total.addressable_shards}
print(f"{mesh.size} ranks, the sum starts with {total[0, :4]}")
print(f"all ranks hold the same bits: {len(copies) == 1}")
