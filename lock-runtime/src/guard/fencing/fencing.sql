-- Fencing tokens for PostgreSQL 10 and later. A transaction calls lock_runtime.fenced first, with
-- the token of its lock:
--
--     begin;
--     select lock_runtime.fenced('account:7', 1795456170925944);
--     update account set balance = balance - 10 where id = 7;
--     commit;
--
-- It is refused with SQLSTATE LK001 if a transaction with a larger token has been committed for the
-- same resource. Execute this file once per database, as the role that will own the schema. It is
-- one statement, so it takes effect as a whole, and several processes may execute it at the same
-- time or again. Other roles need:
--
--     grant usage on schema lock_runtime to my_service;
--     grant execute on function lock_runtime.fenced to my_service;
do $install$
declare
    stranger text;
    known text;
    was_public boolean;
    patience text := pg_catalog.current_setting('lock_timeout');
begin
    -- A role that may not create schemas can then execute this in a schema that it owns.
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
        raise exception using
            errcode = 'serialization_failure',
            message = 'the schema lock_runtime is newer than the snapshot of the transaction';
    end if;

    -- The owner of an object can make it act with the rights of its users. A superuser and the
    -- owner of the database may act so anyway.
    select r.rolname into stranger from pg_catalog.pg_roles r
        where r.oid in (
                select n.nspowner from pg_catalog.pg_namespace n where n.nspname = 'lock_runtime'
                union all select c.relowner from pg_catalog.pg_class c
                    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                    where n.nspname = 'lock_runtime' and c.relname = 'seen'
                union all select p.proowner from pg_catalog.pg_proc p
                    join pg_catalog.pg_namespace n on n.oid = p.pronamespace
                    where n.nspname = 'lock_runtime' and p.proname = 'fenced')
            and r.rolname <> current_user and not r.rolsuper and r.rolname <> 'pg_database_owner'
            and r.oid <> (select d.datdba from pg_catalog.pg_database d
                where d.datname = pg_catalog.current_database())
        limit 1;
    if found then
        raise exception using
            errcode = 'insufficient_privilege',
            message = 'the schema lock_runtime, or a part of it, belongs to the role ' || stranger,
            hint = 'If you trust the role, execute this as that role, after `set role`. '
                || 'Otherwise drop the schema, and ask who created it.';
    end if;

    -- Half of each page is left free, so that an update needs no new entry in the index.
    if pg_catalog.to_regclass('lock_runtime.seen') is null then
        begin
            create table lock_runtime.seen (
                resource text collate "C" primary key,
                fence bigint not null
            ) with (fillfactor = 50);
        exception when unique_violation or duplicate_table or duplicate_object then
            null;
        end;
    end if;
    -- Processes that execute this at once follow one another. Callers of the function do not wait.
    lock table lock_runtime.seen in share update exclusive mode;

    was_public := exists (
        select from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
            where n.nspname = 'lock_runtime' and p.proname = 'fenced'
                and pg_catalog.has_function_privilege('public', p.oid, 'execute'));

    -- With the rights of its owner: callers need none on the table, and so cannot lower a token. No
    -- error contains another token than that of the caller.
    create or replace function lock_runtime.fenced(resource text, fence bigint) returns void
    language plpgsql volatile parallel unsafe security definer
    set search_path = pg_catalog, pg_temp
    as $fenced$
    #variable_conflict use_column
    begin
        -- Not `strict`: a call with a null would do nothing and be taken for a success.
        if fenced.resource is null or fenced.fence is null then
            raise exception using
                errcode = 'null_value_not_allowed',
                message = 'lock_runtime.fenced: the resource and the fencing token must not be null';
        end if;
        if fenced.resource = '' then
            raise exception using
                errcode = 'invalid_parameter_value',
                message = 'lock_runtime.fenced: the name of the resource is empty';
        end if;
        if fenced.fence <= 0 then
            raise exception using
                errcode = 'invalid_parameter_value',
                message = format('lock_runtime.fenced: %s is not a fencing token', fenced.fence),
                hint = 'A fencing token is a number from 1 to 9223372036854775807.';
        end if;
        -- It would refuse all later holders.
        if fenced.fence > extract(epoch from clock_timestamp() + interval '24 hours') * 1000000 then
            raise exception using
                errcode = 'invalid_parameter_value',
                message = format('lock_runtime.fenced: %s is not a fencing token: it is later than '
                    'the clock of the database by more than a day', fenced.fence),
                hint = 'A fencing token is a time in microseconds since 1970. '
                    'Pass the number of the grant as it is.';
        end if;

        -- Waits until another transaction on the same resource has ended, and then compares with
        -- its token. In `repeatable read` and `serializable` it fails with 40001 instead, as all
        -- updates do there.
        insert into lock_runtime.seen values (fenced.resource, fenced.fence)
            on conflict (resource) do update set fence = excluded.fence
            where seen.fence <= excluded.fence;
        if found then
            return;
        end if;

        -- A class of its own: frameworks repeat a transaction that fails with class 40, and this
        -- one never succeeds.
        raise exception using
            errcode = 'LK001',
            message = format('the fencing token %s is stale: %s has seen a later one',
                fenced.fence, fenced.resource),
            detail = 'The lock was lost, and a later holder has written.',
            hint = 'Do not repeat the transaction, and write nothing more under this lock.',
            schema = 'lock_runtime',
            table = 'seen';
    end
    $fenced$;

    -- Every role with `usage` on the schema could execute an earlier version. Such roles still can.
    if was_public then
        for known in
            select r.rolname::text from pg_catalog.pg_namespace n
                cross join lateral pg_catalog.aclexplode(n.nspacl) a
                join pg_catalog.pg_roles r on r.oid = a.grantee
                where n.nspname = 'lock_runtime' and a.privilege_type = 'USAGE'
        loop
            execute 'grant execute on function lock_runtime.fenced to '
                || pg_catalog.quote_ident(known);
        end loop;
    end if;
    revoke execute on function lock_runtime.fenced from public;
end
$install$;
