-- append: the only write of events. All or nothing, in the caller's transaction.
--
--   p_epoch   the caller's reign; a write of an older one is refused                     EH001
--   p_after   the head that the caller decided on; another head is refused               EH002
--   events    one array per column, in order; they get positions p_after + 1, ...
--             a repeated (command, ordinal) violates event_command_ordinal
--   p_freed_* the grants that end: each must have held a cell                            EH004
--   p_held_*  the cells that grants take; one that is held violates holding_cell
--
-- The update of `head` is the lock: a second writer waits there until the first has committed, then finds the head moved.
-- `begin_reign` takes the same lock before it raises the epoch, so the epoch read below is the newest.
create or replace function append(
    p_epoch bigint, p_after bigint,
    p_stream text[], p_version bigint[], p_type text[], p_v smallint[], p_at_ms bigint[], p_command text[], p_ordinal integer[],
    p_operation text[], p_because bigint[], p_actor text[], p_trace text[], p_data text[],
    p_freed_device text[], p_freed_number bigint[],
    p_held_device text[], p_held_cell smallint[], p_held_number bigint[]
) returns bigint
language plpgsql security definer set search_path = public, pg_temp as $$
declare
    taken constant integer := cardinality(p_stream);
    reign bigint;
    freed integer;
begin
    update head set position = position + taken where position = p_after;
    if not found then
        select epoch into reign from leader;
        if reign <> p_epoch then
            raise exception 'epoch % is over, % reigns', p_epoch, reign using errcode = 'EH001';
        end if;
        raise exception 'head is at %, not at %', (select position from head), p_after using errcode = 'EH002';
    end if;
    select epoch into reign from leader;
    if reign <> p_epoch then
        raise exception 'epoch % is over, % reigns', p_epoch, reign using errcode = 'EH001';
    end if;

    insert into event (position, stream, version, type, v, at, command, ordinal, operation, because, actor, trace, data)
    select p_after + e.n, e.stream, e.version, e.type, e.v, timestamptz 'epoch' + e.at_ms * interval '1 millisecond',
           e.command, e.ordinal, e.operation, e.because, e.actor, e.trace, e.data::jsonb
    from unnest(p_stream, p_version, p_type, p_v, p_at_ms, p_command, p_ordinal, p_operation, p_because, p_actor, p_trace, p_data)
        with ordinality
        as e (stream, version, type, v, at_ms, command, ordinal, operation, because, actor, trace, data, n);

    if cardinality(p_freed_number) > 0 then
        with gone as (
            delete from holding using unnest(p_freed_device, p_freed_number) as f (device, number)
            where holding.device = f.device and holding.number = f.number
            returning holding.number
        )
        select count(distinct number) into freed from gone;
        if freed <> cardinality(p_freed_number) then
            raise exception '% grants end, but only % of them held anything', cardinality(p_freed_number), freed
                using errcode = 'EH004';
        end if;
    end if;
    if cardinality(p_held_number) > 0 then
        insert into holding (device, cell, number) select * from unnest(p_held_device, p_held_cell, p_held_number);
    end if;
    return p_after + taken;
end $$;
