-- The records of locks, and guard(). Executed by LockClient::connect where the user may create a
-- schema; otherwise, execute it once as another user, and grant:
--   grant usage on schema lock_runtime to app;
--   grant select on lock_runtime.format to app;
--   grant select, insert, update, delete on lock_runtime.record to app;
-- Repeating it is harmless, and so is executing it several times at once.
do $install$
declare
  installed int;
begin
  perform pg_advisory_xact_lock(7813573191325087086);
  -- A user that may not create schemas can then execute this in a schema that it owns.
  if to_regnamespace('lock_runtime') is null then
    create schema lock_runtime;
  end if;

  -- The version of this file, which grows with each change, and the oldest one whose clients work
  -- with it.
  create table if not exists lock_runtime.format (version int not null, since int not null);
  select version into installed from lock_runtime.format;
  if installed > 1 then
    raise notice 'the schema lock_runtime has version % already, which this one would not improve', installed;
    return;
  end if;

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

  -- Replaces records that have their known versions (0: no record), and sends the messages: all of
  -- them or none. With `each`, and without messages, it replaces those that have theirs. Returns an
  -- outcome for each record (d: done, c: conflict, also with a change in progress) and the present
  -- records of conflicts, or only `e` (early) or `g` (a grant has to wait for a transaction with
  -- guard()). If one of several records cannot be replaced, raises LK010 for a conflict, and LK011
  -- for such a grant.
  create or replace function lock_runtime.swap(
    names text[], known bigint[], versions bigint[], bodies bytea[], sinces bigint[], fences bigint[], needed bigint[],
    not_before bigint, durable bool, each bool, channels text[], messages text[],
    out clock bigint, out outcomes text, out present_versions bigint[], out present_bodies bytea[]
  ) language plpgsql volatile set search_path = pg_catalog, pg_temp set lock_timeout = '2s' as $f$
  declare
    found_version bigint;
    found_body bytea;
    is_done bool;
  begin
    clock := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    if clock < not_before then
      outcomes := 'e';
      return;
    end if;
    outcomes := '';
    for i in 1 .. cardinality(names) loop
      if known[i] = 0 then
        insert into lock_runtime.record (name, version, since, fence, needed_until, body)
          values (names[i], versions[i], sinces[i], fences[i], needed[i], bodies[i])
          on conflict do nothing;
        is_done := found;
      else
        -- Waits for no other change. lock() does, so that waiting calls do not use all connections.
        -- A transaction with guard() holds FOR KEY SHARE, which is compatible with the update and
        -- with the first lock. A grant to others than the present holders takes the second, which
        -- makes the update count as one of the key, so that guard() waits for it and compares with
        -- its result.
        update lock_runtime.record r
          set version = versions[i], since = sinces[i], fence = fences[i], needed_until = needed[i], body = bodies[i]
          where r.name = names[i] and r.ctid = coalesce(
            (select o.ctid from lock_runtime.record o
              where o.name = names[i] and o.version = known[i] and o.since = sinces[i] for no key update skip locked),
            (select o.ctid from lock_runtime.record o
              where o.name = names[i] and o.version = known[i] and o.since <> sinces[i] for update skip locked));
        is_done := found;
        if not is_done then
          perform from lock_runtime.record r
            where r.name = names[i] and r.version = known[i] and r.since <> sinces[i] for no key update skip locked;
          if found then
            perform from lock_runtime.record r where r.name = names[i] for update skip locked;
            if not found then
              if cardinality(names) > 1 then
                raise exception 'a transaction with guard() is open' using errcode = 'LK011';
              end if;
              outcomes := 'g';
              return;
            end if;
          end if;
        end if;
      end if;
      if is_done then
        outcomes := outcomes || 'd';
        continue;
      end if;
      if cardinality(names) > 1 and not each then
        raise exception 'another client has changed one of the records' using errcode = 'LK010';
      end if;
      select r.version, r.body into found_version, found_body from lock_runtime.record r where r.name = names[i];
      present_versions := array_append(present_versions, found_version);
      present_bodies := array_append(present_bodies, found_body);
      outcomes := outcomes || 'c';
      if not each then
        return;
      end if;
    end loop;
    if not durable then
      perform set_config('synchronous_commit', 'off', true);
    elsif current_setting('synchronous_commit') = 'off' then
      perform set_config('synchronous_commit', 'on', true);
    end if;
    for i in 1 .. cardinality(channels) loop
      perform pg_notify(channels[i], messages[i]);
    end loop;
  end $f$;

  -- Locks the present records until the end of the transaction, and returns them in the order of
  -- the names. If the client is paused in between, the server closes its connection. If a row is
  -- locked for longer, the client repeats the call, so that others use its connection meanwhile.
  create or replace function lock_runtime.lock(
    names text[], out clock bigint, out present_versions bigint[], out present_bodies bytea[]
  ) language plpgsql volatile set search_path = pg_catalog, pg_temp as $f$
  declare
    found_version bigint;
    found_body bytea;
  begin
    perform set_config('idle_in_transaction_session_timeout', '1s', true), set_config('lock_timeout', '200ms', true);
    perform from lock_runtime.record r where r.name = any (names) order by r.name for no key update;
    clock := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    for i in 1 .. cardinality(names) loop
      select r.version, r.body into found_version, found_body from lock_runtime.record r where r.name = names[i];
      present_versions := array_append(present_versions, found_version);
      present_bodies := array_append(present_bodies, found_body);
    end loop;
  end $f$;

  -- Deletes those records of a page that are no longer needed, but for those in use. Returns the
  -- last name of the page, or null at the end.
  create or replace function lock_runtime.remove(after text, out last text, out removed bigint)
    language plpgsql volatile set search_path = pg_catalog, pg_temp as $f$
  declare
    now bigint := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    page text[];
  begin
    page := array(select r.name from lock_runtime.record r where r.name > after order by r.name limit 1000);
    last := page[cardinality(page)];
    with old as materialized (
      select r.name from lock_runtime.record r where r.name = any (page) and r.needed_until < now for update skip locked
    )
    delete from lock_runtime.record r using old where r.name = old.name;
    get diagnostics removed = row_count;
  end $f$;

  -- Refuses a transaction of a holder that has lost its lock. Until the transaction ends, the lock
  -- is granted to no other client, not even after its lease has ended. Renewals are not delayed.
  -- With the rights of its owner: callers need none on the table.
  create or replace function lock_runtime.guard(lock_name text, token bigint) returns void
    language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $f$
  declare
    earliest bigint;
    latest bigint;
  begin
    if lock_name is null or token is null then
      raise exception 'guard() needs the name of a lock and a fencing token' using errcode = 'null_value_not_allowed';
    end if;
    if token <= 0 then
      raise exception '% is not a fencing token', token using errcode = 'invalid_parameter_value';
    end if;
    perform from lock_runtime.record r where r.name = lock_name and r.since <= token and token <= r.fence for key share;
    if found then
      return;
    end if;
    -- The other isolation levels do not see a lock that was first granted after their snapshot.
    -- This fails then, as a serialization failure, and otherwise changes nothing.
    if current_setting('transaction_isolation') <> 'read committed' then
      begin
        insert into lock_runtime.record values (lock_name, 1, 0, 0, 0, '') on conflict do nothing;
        raise exception using errcode = 'LK012';
      exception when sqlstate 'LK012' then
        null;
      end;
    end if;
    select r.since, r.fence into earliest, latest from lock_runtime.record r where r.name = lock_name;
    if latest is null then
      raise exception 'the lock % is not known here', lock_name using errcode = 'LK001',
        hint = 'The name is "<namespace>:<key>", such as lock:order:42, of a lock that is kept in this database.';
    end if;
    if earliest > latest and token <= latest then
      raise exception 'the fencing token % is stale: the lock % was revoked', token, lock_name using errcode = 'LK001',
        hint = 'An operator has revoked the lock. Do not repeat the transaction.';
    end if;
    raise exception 'the fencing token % is stale: the lock % was granted with %', token, lock_name, latest using errcode = 'LK001',
      hint = 'The holder has lost the lock. Do not repeat the transaction.';
  end $f$;

  delete from lock_runtime.format where version < 1;
  insert into lock_runtime.format select 1, 1 where not exists (select from lock_runtime.format);
end $install$;
