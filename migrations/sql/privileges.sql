-- Where the plane's processes have a role of their own (embedded, or made so by the administrator), it may read everything,
-- write events only through `append`, and the tables beside the log directly.
revoke execute on function append, begin_reign, first_since, refuse_change from public;
do $$
begin
    if current_user <> 'enginehouse' and exists (select from pg_roles where rolname = 'enginehouse') then
        grant usage on schema public to enginehouse;
        grant select on all tables in schema public to enginehouse;
        grant insert, delete on snapshot to enginehouse;
        grant insert, update, delete on request_body to enginehouse;
        grant insert, update on token to enginehouse;
        grant execute on function append, begin_reign, first_since to enginehouse;
    end if;
end $$;
