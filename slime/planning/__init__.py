"""What a run will be, said before it takes a GPU: layout, memory, traffic and time, from the flags alone.

    plan = make_plan(args, PlanOptions(...))          # plan.py
    print(plan_tables(plan))                          # tables.py

Everything below ``plan.py`` is arithmetic over frozen configs (``ModelShape``, ``ParallelSizes``, ``TrainerSettings``,
``EngineShape``): no torch, no Megatron, no SGLang, no Ray.  What the numbers were checked against is in docs/plan.md.
"""
