-- begin_reign: raise the epoch. The caller holds the advisory lock of leaders; the row lock on `head` keeps an append
-- of the old reign from slipping in between.
create or replace function begin_reign(p_host text, p_pid integer) returns bigint
language plpgsql security definer set search_path = public, pg_temp as $$
declare
    reign bigint;
begin
    perform 1 from head for update;
    update leader set epoch = epoch + 1, host = p_host, pid = p_pid, since = now() returning epoch into reign;
    return reign;
end $$;
