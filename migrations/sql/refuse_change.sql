-- The log is append-only whoever asks; privileges say the same to all but the owner.
create or replace function refuse_change() returns trigger
language plpgsql as $$
begin
    raise exception 'events are never changed: % on % is refused', tg_op, tg_table_name using errcode = 'EH005';
end $$;

create trigger event_append_only before update or delete or truncate on event
    for each statement execute function refuse_change();
