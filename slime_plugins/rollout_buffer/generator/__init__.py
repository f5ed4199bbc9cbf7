"""Generators: modules named ``*_generator.py`` with ``TASK_TYPE`` and ``run_rollout(data)``.

A module may also define ``transform_group(group, task_type)``, ``is_valid_group(group, min_size, task_type)`` and
``get_group_data_meta_info(temp_data)``; ``group`` is ``(instance_id, items)``, ``temp_data`` maps ids to items.
"""
