-- first_since: position of the first event at or after a time (Unix milliseconds); head + 1 when there is none.
-- The log's time never runs backwards, so a search by halves over the primary key does: no index on time to maintain.
create or replace function first_since(p_at_ms bigint) returns bigint
language plpgsql stable as $$
declare
    since constant timestamptz := timestamptz 'epoch' + p_at_ms * interval '1 millisecond';
    low bigint := (select coalesce(min(position), 1) from event);
    high bigint := (select position + 1 from head);
    middle bigint;
begin
    while low < high loop
        middle := (low + high) / 2;
        if (select at from event where position = middle) < since then
            low := middle + 1;
        else
            high := middle;
        end if;
    end loop;
    return low;
end $$;
