"""The CUDA kernels, in CuTe DSL: the only package of the library that imports ``cutlass``.

``memory.py`` holds the PTX instructions, ``twoshot.py`` and ``oneshot.py`` the protocol as device functions,
``all_reduce.py`` the kernels that ``jax_twoshot.all_reduce`` launches, ``launch.py`` what other kernels need around
the protocol (``jax_twoshot.cutedsl`` is its public name) and ``build.py`` compiles those. To *run* a compiled
kernel nothing here is needed: ``jax_twoshot.cubin`` finds it, and imports these modules only to compile.
"""
