"""The plan of a run before it takes a GPU: layout, memory, traffic and time, from the flags alone.

    plan = make_plan(args, hf_config, PlanOptions(...))   # make_plan.py; what a plan says is in plan.py
    print(plan_tables(plan, problems, notes))             # tables.py

``make_plan.py`` reads ``args``.  What it calls is arithmetic over frozen configs (``RunFlags``, ``ModelDims``,
``ParallelSizes``, ``TrainerSettings``, ``EngineShape``): no torch, no Megatron, no SGLang, no Ray.  What the numbers
were checked against is in docs/plan.md.
"""
