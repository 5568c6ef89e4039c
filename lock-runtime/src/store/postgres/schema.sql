-- The records of locks, and guard(). Executed by LockClient::connect where the user may create a
-- schema; otherwise, execute it once as another user, and grant:
--   grant usage on schema lock_runtime to app;
--   grant select on lock_runtime.format to app;
--   grant select, insert, update, delete on lock_runtime.record to app;
--   grant execute on all functions in schema lock_runtime to app;
-- A role that only calls guard() needs:
--   grant usage on schema lock_runtime to holder;
--   grant execute on function lock_runtime.guard to holder;
-- Repeating it is harmless, and so is executing it several times at once.
do $install$
declare
  installed int;
  stranger text;
  known text;
  called text;
  patience text := pg_catalog.current_setting('lock_timeout');
begin
  -- A user that may not create schemas can then execute this in a schema that it owns.
  if pg_catalog.to_regnamespace('lock_runtime') is null then
    -- A stranger may keep the creation of a schema of this name in an open transaction.
    perform pg_catalog.set_config('lock_timeout', '2s', true);
    begin
      create schema lock_runtime;
    exception when unique_violation or duplicate_schema then
      -- Another process has created it in the meantime.
      null;
    end;
    perform pg_catalog.set_config('lock_timeout', patience, true);
  end if;
  if not exists (select from pg_catalog.pg_namespace n where n.nspname = 'lock_runtime') then
    raise exception 'the schema lock_runtime is newer than the snapshot of the transaction; repeat it'
      using errcode = 'serialization_failure';
  end if;

  -- The owner of an object can make it act with the rights of its users. A superuser and the owner
  -- of the database may act so anyway.
  select r.rolname into stranger from pg_catalog.pg_roles r
    where r.oid in (
        select n.nspowner from pg_catalog.pg_namespace n where n.nspname = 'lock_runtime'
        union all select c.relowner from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
          where n.nspname = 'lock_runtime' and c.relname in ('format', 'record')
        union all select p.proowner from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
          where n.nspname = 'lock_runtime'
            and p.proname in ('micros', 'swap', 'lock', 'remove', 'varint', 'is_held', 'guard'))
      and r.rolname <> current_user and not r.rolsuper and r.rolname <> 'pg_database_owner'
      and r.oid <> (select d.datdba from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
    limit 1;
  if found then
    raise exception 'the schema lock_runtime, or a part of it, belongs to the role %', stranger
      using errcode = 'insufficient_privilege',
      hint = 'If you trust the role, execute this as that role, after `set role`. Otherwise drop the schema, and ask who created it.';
  end if;

  -- The version of this file, which grows with each change, and the oldest one whose clients work
  -- with it.
  if pg_catalog.to_regclass('lock_runtime.format') is null then
    begin
      create table lock_runtime.format (version int not null, since int not null);
    exception when unique_violation or duplicate_table or duplicate_object then
      null;
    end;
  end if;
  -- Processes that execute this at once follow one another.
  lock table lock_runtime.format in share update exclusive mode;
  select version into installed from lock_runtime.format;
  if installed > 7 then
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

  -- Whether the record of a lock contains a holder whose lease has not ended. Its layout is that of
  -- `Body` in store/records/step/body.rs. An index beyond its end is an error, so no loop is longer
  -- than the record. Numbers are read here, as a call of a function takes longer than all of them.
  create or replace function lock_runtime.is_held(stored bytea) returns boolean
    language plpgsql volatile set search_path = pg_catalog, pg_temp as $f$
  declare
    now bigint := extract(epoch from clock_timestamp()) * 1000000;
    -- In memory, where it was stored out of line.
    body bytea := stored || ''::bytea;
    place int := 1;
    part int;
    shift int;
    number bigint;
    -- The number that is read: 1 and 2 are fencing tokens, 3 that of the holders that were revoked,
    -- 4 the mode, 5 the number of permits, 6 that of the slots, 7 the end of a lease, and 8 a
    -- fencing token.
    field int := 1;
    slots bigint := 0;
    is_reserved boolean;
  begin
    if get_byte(body, 0) <> 1 then
      raise exception 'the record of the lock has a format of another version' using errcode = 'data_corrupted';
    end if;
    loop
      if field = 7 then
        if slots <= 0 then
          return false;
        end if;
        slots := slots - 1;
        is_reserved := get_byte(body, place + 16) <> 0;
        place := place + 17;
      end if;
      part := get_byte(body, place);
      number := part & 127;
      shift := 7;
      while part >= 128 loop
        if shift > 63 then
          raise exception 'a record is damaged' using errcode = 'data_corrupted';
        end if;
        place := place + 1;
        part := get_byte(body, place);
        number := number | ((part & 127)::bigint << shift);
        shift := shift + 7;
      end loop;
      place := place + 1;
      if field = 3 then
        place := place + 16 * number;
      elsif field = 4 and number <> 2 then
        field := 5;
      elsif field = 6 then
        slots := number;
      elsif field = 7 and number > now and not is_reserved then
        return true;
      end if;
      field := case field when 8 then 7 else field + 1 end;
    end loop;
  end $f$;

  -- Refuses a transaction of a holder that has lost its lock. Until the transaction ends, the lock
  -- is granted to no other client, not even after its lease has ended. Renewals are not delayed.
  -- With the rights of its owner: callers need none on the table. No error contains another token
  -- than that of the caller, as a token lets its bearer keep the lock from others.
  --
  -- A caller that is no holder must keep no row: the server waits for a caller that does not read a
  -- message, and undoes nothing meanwhile. Therefore no message is sent but errors, an error does
  -- not end the session before it is undone (exit_on_error), and a statement
  -- that locks or inserts a row fails by itself, by a division by zero, so that the session cannot
  -- be ended in between. It selects the row by its name alone: the row may have changed once it is
  -- locked, and one that another condition does not fit any more would stay locked.
  create or replace function lock_runtime.guard(lock_name text, token bigint) returns void
    language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp
    set client_min_messages = error set exit_on_error = off as $f$
  declare
    earliest bigint;
    latest bigint;
    found_body bytea;
    live_body bytea;
    is_live boolean;
    one int;
  begin
    if lock_name is null or token is null then
      raise exception 'guard() needs the name of a lock and a fencing token' using errcode = 'null_value_not_allowed';
    end if;
    if token <= 0 then
      raise exception '% is not a fencing token', token using errcode = 'invalid_parameter_value';
    end if;
    if token > lock_runtime.micros() + 86400000000 then
      raise exception '% is not a fencing token: it is later than the clock of the database by more than a day', token
        using errcode = 'invalid_parameter_value',
        hint = 'A fencing token is a time in microseconds since 1970. Pass the number of the grant as it is.';
    end if;
    -- Locks no row: the server sends a refusal before it undoes the transaction, so a caller that
    -- does not read it would keep a free lock from all others.
    select r.body into found_body from lock_runtime.record r
      where r.name = lock_name and r.since <= token and token <= r.fence;
    if found then
      is_live := lock_runtime.is_held(found_body);
      -- The holder may have renewed its lease since the snapshot. This waits for a renewal in
      -- progress. In the other isolation levels it fails after a renewal, as a serialization
      -- failure. It keeps no lock of the row.
      if not is_live then
        begin
          perform 1 / (locked.version - locked.version) from (select r.version from lock_runtime.record r
            where r.name = lock_name for no key update) locked;
        exception when division_by_zero then
          null;
        end;
        select r.body into found_body from lock_runtime.record r
          where r.name = lock_name and r.since <= token and token <= r.fence;
        if found then
          is_live := lock_runtime.is_held(found_body);
        end if;
      end if;
      if is_live then
        live_body := found_body;
        begin
          select locked.body, 1 / (locked.since <= token and token <= locked.fence)::int into found_body, one
            from (select r.body, r.since, r.fence from lock_runtime.record r
              where r.name = lock_name for key share) locked;
        exception when division_by_zero then
          found_body := null;
        end;
        -- A call that meets the release keeps no more than it could have kept a moment earlier.
        if found_body = live_body or found_body is not null and lock_runtime.is_held(found_body) then
          return;
        end if;
      end if;
    end if;
    if found_body is not null then
      raise exception 'the fencing token % is stale: the lock % was released, or its lease has ended', token, lock_name
        using errcode = 'LK001', hint = 'Call guard() while the lock is held. Do not repeat the transaction.';
    end if;
    -- The other isolation levels do not see a lock that was first granted after their snapshot.
    -- This fails then, as a serialization failure, and otherwise changes nothing.
    if current_setting('transaction_isolation') <> 'read committed' then
      begin
        insert into lock_runtime.record values (lock_name, 1, 0, 0, 0, '') on conflict do nothing
          returning 1 / since into earliest;
      exception when division_by_zero then
        null;
      end;
    end if;
    select r.since, r.fence into earliest, latest from lock_runtime.record r where r.name = lock_name;
    if latest is null then
      raise exception 'the lock % is not known here', lock_name using errcode = 'LK001',
        hint = 'The name is "<namespace>:<key>", such as lock:order:42, of a lock that is kept in this database.';
    end if;
    -- The message does not depend on the order of the tokens, which would reveal the other one.
    if earliest > latest then
      raise exception 'the fencing token % is stale: the lock % was revoked', token, lock_name using errcode = 'LK001',
        hint = 'An operator has revoked the lock. Do not repeat the transaction.';
    end if;
    raise exception 'the fencing token % is stale: the lock % was granted again, with another one', token, lock_name
      using errcode = 'LK001', hint = 'The holder has lost the lock. Do not repeat the transaction.';
  end $f$;

  -- Before version 2, every role with `usage` on the schema could execute them. Such roles still
  -- can.
  if installed < 2 then
    for known, called in
      select r.rolname::text, p.proname::text from pg_catalog.pg_namespace n
        cross join lateral pg_catalog.aclexplode(n.nspacl) a join pg_catalog.pg_roles r on r.oid = a.grantee
        join pg_catalog.pg_proc p on p.pronamespace = n.oid
        where n.nspname = 'lock_runtime' and a.privilege_type = 'USAGE'
          and p.proname in ('micros', 'swap', 'lock', 'remove', 'guard')
          -- Not if an administrator has taken the right away before.
          and (p.proacl is null or exists (select from pg_catalog.aclexplode(p.proacl) e
            where e.grantee = 0::pg_catalog.oid and e.privilege_type = 'EXECUTE'))
    loop
      execute 'grant execute on function lock_runtime.' || pg_catalog.quote_ident(called)
        || ' to ' || pg_catalog.quote_ident(known);
    end loop;
  end if;
  revoke execute on function lock_runtime.micros, lock_runtime.swap, lock_runtime.lock, lock_runtime.remove,
    lock_runtime.is_held, lock_runtime.guard from public;
  -- guard() runs with the rights of its owner, which a superuser who executes this may not be.
  for known in
    select pg_catalog.pg_get_userbyid(p.proowner)::text from pg_catalog.pg_proc p
      join pg_catalog.pg_namespace n on n.oid = p.pronamespace
      where n.nspname = 'lock_runtime' and p.proname = 'guard'
  loop
    execute 'grant execute on function lock_runtime.micros, lock_runtime.is_held to '
      || pg_catalog.quote_ident(known);
  end loop;

  delete from lock_runtime.format where version < 7;
  insert into lock_runtime.format select 7, 1 where not exists (select from lock_runtime.format);
end $install$;
