-- The records of locks, and guard(). Executed by LockClient::connect where the user may create a
-- schema; otherwise, execute it once as another user, and grant:
--   grant usage on schema lock_runtime to app;
--   grant select, insert, update, delete on all tables in schema lock_runtime to app;
-- Repeating it is harmless, and so is executing it several times at once.
do $install$
begin
  perform pg_advisory_xact_lock(7813573191325087086);
  -- A user that may not create schemas can then execute this in a schema that it owns.
  if to_regnamespace('lock_runtime') is null then
    create schema lock_runtime;
  end if;

  -- The format of the records, and the oldest format whose clients work with it.
  create table if not exists lock_runtime.format (version int not null, since int not null);
  insert into lock_runtime.format select 1, 1 where not exists (select from lock_runtime.format);
  update lock_runtime.format set version = 1 where version < 1;

  -- Half of each page stays free, and no index contains a column that changes, so updates are
  -- heap-only.
  create table if not exists lock_runtime.record (
    name text collate "C" primary key,
    version bigint not null,
    -- The fencing tokens with which the holders may write.
    since bigint not null,
    fence bigint not null,
    -- Microseconds since 1970.
    needed_until bigint not null,
    body bytea not null
  ) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

  create or replace function lock_runtime.micros() returns bigint
    language sql volatile set search_path = pg_catalog, pg_temp
    as $f$ select (extract(epoch from clock_timestamp()) * 1000000)::bigint $f$;

  -- The advisory lock between the grants of a lock and the transactions with guard().
  create or replace function lock_runtime.advisory(lock_name text) returns bigint
    language sql immutable
    as $f$ select pg_catalog.hashtextextended($1 collate "C", 7813573191325087086) $f$;

  -- Replaces records that have their known versions (0: no record). Returns the outcome (d: done,
  -- c: conflict, e: early) and the present records after a conflict. Raises lock_not_available if a
  -- grant has to wait for a transaction with guard().
  create or replace function lock_runtime.swap(
    names text[], known bigint[], versions bigint[], bodies bytea[], sinces bigint[], fences bigint[], needed bigint[],
    not_before bigint, durable bool, channels text[], messages text[],
    out clock bigint, out outcome "char", out present_versions bigint[], out present_bodies bytea[]
  ) language plpgsql volatile set search_path = pg_catalog, pg_temp set lock_timeout = '2s' as $f$
  declare
    found_version bigint;
    found_since bigint;
  begin
    clock := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    if clock < not_before then
      outcome := 'e';
      return;
    end if;
    -- Without locks, as most conflicts are seen here and need not wait for the other change.
    outcome := 'd';
    for i in 1 .. cardinality(names) loop
      select r.version, r.since into found_version, found_since from lock_runtime.record r where r.name = names[i];
      if coalesce(found_version, 0) <> known[i] then
        outcome := 'c';
        exit;
      end if;
      if known[i] = 0 then
        insert into lock_runtime.record (name, version, since, fence, needed_until, body)
          values (names[i], versions[i], sinces[i], fences[i], needed[i], bodies[i])
          on conflict do nothing;
      else
        update lock_runtime.record r
          set version = versions[i], since = sinces[i], fence = fences[i], needed_until = needed[i], body = bodies[i]
          where r.name = names[i] and r.version = known[i];
      end if;
      if not found then
        outcome := 'c';
        exit;
      end if;
      -- A grant to others than the present holders. One of these may have an open transaction with
      -- guard(). Until the end of this one, guard() waits.
      if sinces[i] <> coalesce(found_since, 0) and not pg_try_advisory_xact_lock(lock_runtime.advisory(names[i])) then
        raise exception 'a transaction with guard() is open' using errcode = 'lock_not_available';
      end if;
    end loop;
    if outcome = 'c' then
      if cardinality(names) > 1 then
        -- Undoes the changes before this one.
        raise exception 'another client has changed one of the records' using errcode = 'LK010';
      end if;
      select array[r.version], array[r.body] into present_versions, present_bodies
        from lock_runtime.record r where r.name = names[1];
      return;
    end if;
    if not durable then
      perform set_config('synchronous_commit', 'off', true);
    end if;
    for i in 1 .. cardinality(channels) loop
      perform pg_notify(channels[i], messages[i]);
    end loop;
  end $f$;

  -- Locks the present records until the end of the transaction, and returns them in the order of
  -- the names. If the client is paused in between, the server closes its connection.
  create or replace function lock_runtime.lock(
    names text[], out clock bigint, out present_versions bigint[], out present_bodies bytea[]
  ) language plpgsql volatile set search_path = pg_catalog, pg_temp as $f$
  declare
    found_version bigint;
    found_body bytea;
  begin
    perform set_config('idle_in_transaction_session_timeout', '1s', true), set_config('lock_timeout', '5s', true);
    perform from lock_runtime.record r where r.name = any (names) order by r.name for no key update;
    clock := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    for i in 1 .. cardinality(names) loop
      select r.version, r.body into found_version, found_body from lock_runtime.record r where r.name = names[i];
      present_versions := array_append(present_versions, found_version);
      present_bodies := array_append(present_bodies, found_body);
    end loop;
  end $f$;

  -- Refuses a transaction of a holder that has lost its lock. Until the transaction ends, the lock
  -- is granted to no other client, not even after its lease has ended. Renewals are not delayed.
  create or replace function lock_runtime.guard(lock_name text, token bigint) returns void
    language plpgsql volatile set search_path = pg_catalog, pg_temp as $f$
  declare
    oldest bigint;
    latest bigint;
  begin
    if lock_name is null or token is null then
      raise exception 'guard() needs the name of a lock and a fencing token' using errcode = 'null_value_not_allowed';
    end if;
    perform pg_advisory_xact_lock_shared(lock_runtime.advisory(lock_name));
    -- The other isolation levels read an older state than that of the latest grant, if it was
    -- committed after their snapshot. Then this fails, as a serialization failure. The row is not
    -- kept locked, so that the lock can be renewed.
    if current_setting('transaction_isolation') <> 'read committed' then
      begin
        perform from lock_runtime.record r where r.name = lock_name for share;
        raise exception using errcode = 'LK011';
      exception when sqlstate 'LK011' then
        null;
      end;
    end if;
    select r.since, r.fence into oldest, latest from lock_runtime.record r where r.name = lock_name;
    if oldest is null then
      raise exception 'the lock % is not known here', lock_name using errcode = 'LK001',
        hint = 'The name is "<namespace>:<key>", such as lock:order:42, of a lock that is kept in this database.';
    end if;
    if token < oldest or latest < token then
      raise exception 'the fencing token % is stale: the lock % was granted with %', token, lock_name, latest using errcode = 'LK001',
        hint = 'The holder has lost the lock. Do not repeat the transaction.';
    end if;
  end $f$;
end $install$;
