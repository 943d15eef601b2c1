-- head: the last position given. One row; locking it is what puts appends in order.
create table head (
    one boolean primary key default true check (one),
    position bigint not null
) with (fillfactor = 10);
insert into head (position) values (0);

-- leader: the reigning decider. Its epoch rises with every reign.
create table leader (
    one boolean primary key default true check (one),
    epoch bigint not null,
    host text,
    pid integer,
    since timestamptz
);
insert into leader (epoch) values (0);

-- event: the log. Columns are the envelope's fields.
create table event (
    position bigint primary key,
    stream text not null,
    version bigint not null check (version > 0),
    type text not null,
    v smallint not null,
    at timestamptz not null,
    command text not null,
    ordinal integer not null,
    operation text,
    because bigint,
    actor text not null,
    trace text,
    data jsonb not null,
    constraint event_command_ordinal unique (command, ordinal),
    constraint event_stream_version unique (stream, version)
);
create index event_of_operation on event (operation, position) where operation is not null;
create index event_of_type on event (type, position);
-- The event that ends a request holds all that a row of the request log shows.
create index event_ended on event (position) where type in ('RequestFinished', 'RequestFailed', 'RequestCancelled');
create index event_ended_of_model on event ((data ->> 'model'), position)
    where type in ('RequestFinished', 'RequestFailed', 'RequestCancelled');

-- holding: which grant holds which cell. The key is what makes two holders of one cell impossible.
create table holding (
    device text not null,
    cell smallint not null check (cell between 0 and 7),
    number bigint not null,
    constraint holding_cell primary key (device, cell)
);

-- snapshot: a folded state, always rebuildable.
create table snapshot (
    position bigint not null,
    evolve_version integer not null,
    state bytea not null,
    digest bytea not null,
    taken_at timestamptz not null default now(),
    primary key (position, evolve_version)
);
alter table snapshot alter column state set storage external; -- it is compressed already

-- request_body: written by web alone, with retention.
create table request_body (
    request text primary key,
    digest text not null,
    body bytea not null,
    written_at timestamptz not null default now()
);
create index request_body_written on request_body (written_at);

-- token: API tokens, hashed.
create table token (
    id text primary key,
    name text not null,
    hash bytea not null unique,
    scope text not null default 'admin' check (scope in ('admin', 'inference')),
    created_at timestamptz not null default now(),
    revoked_at timestamptz
);
