"""The CUDA kernels, in CuTe DSL: the only package of the library that imports ``cutlass``.

``memory.py`` holds the PTX instructions, ``twoshot.py`` and ``oneshot.py`` the protocol as device functions (for
kernels of your own too), ``all_reduce.py`` the kernels that ``jax_twoshot.all_reduce`` launches. To *run* a
compiled kernel nothing here is needed: ``jax_twoshot.cubin`` finds it, and imports these modules only to compile.
"""
